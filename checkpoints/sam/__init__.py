"""SAM 3 and 3.1: files on disk <-> parameter trees."""

from checkpoints.sam.account import Group, account, is_sam
from checkpoints.sam.load import load, read_config
from checkpoints.sam.write import write

__all__ = ["Group", "account", "is_sam", "load", "read_config", "write"]
