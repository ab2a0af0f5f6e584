"""Data sets, splits, few-shot and the federation made of them."""
