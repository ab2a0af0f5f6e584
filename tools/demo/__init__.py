"""The parts of `tools/build_demo.py`."""
