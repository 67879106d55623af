"""Stand-ins for other packages: their names and arguments, with the loader of tensorfs behind them."""
