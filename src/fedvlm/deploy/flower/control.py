"""Flower's command line, with the word that lets it in."""

from importlib import import_module

from fedvlm.deploy.flower.gate import carry
from fedvlm.engines.flower.api import flower

if __name__ == "__main__":
    flower()
    carry()
    import_module("flwr.cli.app").app()
