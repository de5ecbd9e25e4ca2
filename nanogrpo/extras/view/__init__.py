"""`nanogrpo view`: a run in the browser. Start with server.py."""
