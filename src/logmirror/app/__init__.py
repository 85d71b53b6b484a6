"""One module per command: settings to components, and what the command does with them."""
