"""Other engines under the same load, each in a process and a Python environment of its own.

`protocol` is our half of the conversation. The drivers are scripts: they need the standard library,
the engine that they drive, and `driver_lines.py` beside them, and import nothing of jaxinfer.
"""
