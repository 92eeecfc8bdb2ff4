"""One HTML file about one run or several. It opens from disk and loads nothing from the network."""
