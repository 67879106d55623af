"""Load formats for inference engines. The engines find them by entry points, so no program has to import them."""
