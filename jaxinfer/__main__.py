"""`python -m jaxinfer`: the same as the `jaxinfer` command."""

from jaxinfer.cli import app

app()
