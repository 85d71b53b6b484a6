"""Listeners, authentication and authorization."""
