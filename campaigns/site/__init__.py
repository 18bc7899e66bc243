"""The built site in a browser."""
