"""How the tiny checkpoint is taught: its tokenizer, its texts and its training."""
