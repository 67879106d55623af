"""Load formats for inference engines. The engines find them by their entry points; nobody has to import them."""
