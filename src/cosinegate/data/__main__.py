"""`python -m cosinegate.data cifar10`: fetch and verify a data set ahead of training."""

import argparse

from cosinegate import cli
from cosinegate.data import IMAGE_SETS
from cosinegate.data.sources import load
from cosinegate.terminal.errors import UserError

cli.check_surroundings()
parser = argparse.ArgumentParser(prog="python -m cosinegate.data", description="Fetch and verify a data set.")
parser.add_argument("name", choices=sorted(IMAGE_SETS))
parser.add_argument("--root", default="data", help="where verified data is kept")
parser.add_argument("--folder", help="a folder that holds the original files; looked at first")
arguments = parser.parse_args()
try:
    arrays = load(IMAGE_SETS[arguments.name], arguments.root, arguments.folder)
except (UserError, OSError) as error:
    cli.end(error)
except KeyboardInterrupt:
    cli.end_interrupted()
print(f"{arguments.name}: {len(arrays.train_labels)} training and {len(arrays.test_labels)} test images, verified")
