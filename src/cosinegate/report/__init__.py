"""One HTML file about one run or several: opens from disk, asks the network for nothing."""
