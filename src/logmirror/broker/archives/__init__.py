"""Archives of mirrors as read-only topics."""
