"""The live page of a server or a site."""

from fedvlm.deploy.watch.page import page
from fedvlm.deploy.watch.service import app, metrics, serve

__all__ = ["app", "metrics", "page", "serve"]
