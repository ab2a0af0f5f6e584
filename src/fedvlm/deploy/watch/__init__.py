"""The live page of a server or a site."""

from fedvlm.deploy.watch.page import live_page
from fedvlm.deploy.watch.service import create_app, prometheus_metrics, serve_live_page

__all__ = ["create_app", "live_page", "prometheus_metrics", "serve_live_page"]
