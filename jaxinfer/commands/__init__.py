"""What each command of the command line does; `jaxinfer.cli` declares them."""
