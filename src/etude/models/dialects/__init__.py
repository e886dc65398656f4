"""One chat dialect per file, all behind `models/renderer.py`; `choose.py` knows them by name."""
