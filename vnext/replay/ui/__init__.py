"""The scrubber: a log as a local web page. app.py serves it; the others answer what it asks."""
