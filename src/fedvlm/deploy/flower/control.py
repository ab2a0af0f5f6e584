"""Flower's command line, with the word that lets it in."""

from importlib import import_module

from fedvlm.deploy.flower.gate import attach_token
from fedvlm.engines.flower.api import import_flower

if __name__ == "__main__":
    import_flower()
    attach_token()
    import_module("flwr.cli.app").app()
