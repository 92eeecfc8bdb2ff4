"""The skipping runtime: F runs for the samples whose gate is open, and for no other.

What is done for its time: the convolution, the addition and the ReLU are one oneDNN call, with weights laid out once; a
batch is cut into micro-batches, whose maps stay in cache; a closed sample that stands among open ones changes places
with an open one behind them, so that F runs on a slice and writes over it, and no other map is touched. (A gated block
that changes the shape gathers its open samples and scatters them.)
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from cosinegate.deploy.eyes import ExitEye, Eye
from cosinegate.deploy.folded import FoldedBlock, FoldedNetwork, Leading
from cosinegate.gates import Seen

MICRO_BATCH = 32
PREPARED = 64  # sizes of a block's convolutions that oneDNN is shown ahead; of many more it would forget the first
# elsewhere the same calls are made one after the other; without AVX2 oneDNN's fused addition ends the process
FUSES = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class FusedConv:
    """A convolution with what follows it, as torch's own compiler calls it: ReLU, and an addition before it."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer = layer
        self.places = (layer.padding, layer.stride, layer.dilation, layer.groups)
        self.packed: dict[torch.Size, Tensor] = {}  # oneDNN's layout of the weights, by the size of a map

    def weight(self, x: Tensor) -> Tensor:
        """Laid out as oneDNN wants it for maps of this size, once."""
        size = x.shape[2:]
        if size not in self.packed:
            self.packed[size] = torch.ops.mkldnn._reorder_convolution_weight(self.layer.weight, *self.places, x.shape)
        return self.packed[size]

    def __call__(self, x: Tensor) -> Tensor:
        """ReLU(convolution)."""
        if not FUSES:
            return self.layer(x).relu_()
        return torch.ops.mkldnn._convolution_pointwise(x, self.weight(x), self.layer.bias, *self.places, "relu", [], "")

    def add_to(self, onto: Tensor, x: Tensor, relu: bool) -> Tensor:
        """`onto` plus the convolution, and its ReLU, written over `onto`."""
        if not FUSES:
            y = onto.add_(self.layer(x))
            return y.relu_() if relu else y
        after = "relu" if relu else None
        return torch.ops.mkldnn._convolution_pointwise_.binary(
            onto, x, self.weight(x), self.layer.bias, *self.places, "add", None, after, [], ""
        )


class Places:
    """Which sample of a micro-batch stands where."""

    def __init__(self) -> None:
        self.order: Tensor | None = None  # for each place, the sample's own number; None while all stand in their own
        self.moved: Tensor | None = None  # by the last gate: for each place, the one that the sample came from

    def open_first(self, x: Tensor, is_open: Tensor, number: int) -> None:
        """Swaps maps of x (B, C, H, W), so that the open samples are the first ones. There are at most as many swaps as
        open samples, and at most as many as closed ones."""
        closed = (~is_open[:number]).nonzero().squeeze(1)
        if len(closed) == 0:
            return
        opened = is_open[number:].nonzero().squeeze(1) + number
        here, there = torch.cat((closed, opened)), torch.cat((opened, closed))
        rows = _rows(x)
        rows.index_copy_(0, here, rows.index_select(0, there))
        self.moved = torch.arange(len(x))
        self.moved[here] = there
        self.order = self.moved if self.order is None else self.order[self.moved]

    def follow(self, seen: Seen) -> Seen:
        """What was seen before the last gate, where the samples stand now."""
        if self.moved is None:
            return seen
        moved, self.moved = self.moved, None
        return tuple(part[moved] for part in seen) if isinstance(seen, tuple) else seen[moved]

    def in_own_places(self, values: Tensor) -> Tensor:
        """The samples' values (B, ...), in the order in which they came."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order, values)


class RuntimeBlock:
    """A folded block with its calls laid out."""

    def __init__(self, block: FoldedBlock) -> None:
        self.block = block
        self.convolutions = [FusedConv(layer) for layer in block.convolutions]
        self.is_identity = isinstance(block.shortcut, nn.Identity)

    def __call__(self, x: Tensor, seen: Seen, places: Places, gates: Tensor) -> Tensor:
        """Takes x away: its memory may hold the result. Writes what was decided into `gates`."""
        block = self.block
        if block.removed:
            return block.identity(x)
        if block.head is None:
            return self.full(x)
        if block.head.compares:
            y, is_open = block.compared(x)
            gates.copy_(places.in_own_places(is_open.squeeze(1)))
            return y
        is_open = block.head(seen).squeeze(1)
        gates.copy_(places.in_own_places(is_open))
        places.moved = None
        number = int(is_open.sum())
        if number == len(x):
            return self.full(x)
        if number == 0:
            return block.identity(x)
        if not self.is_identity:
            computed, y = is_open.nonzero().squeeze(1), block.identity(x)
            some = self.full(_like_rows(_rows(x).index_select(0, computed), x))
            _rows(y).index_copy_(0, computed, _rows(some))
            return y
        places.open_first(x, is_open, number)
        self.full(x[:number])
        return x

    def full(self, x: Tensor) -> Tensor:
        onto = x if self.is_identity else self.block.shortcut(x).contiguous(memory_format=torch.channels_last)
        *first, last = self.convolutions
        for convolution in first:
            x = convolution(x)
        return last.add_to(onto, x, self.block.post_activation)


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) in channels_last as (B, H·W·C): a sample is a row, and rows are copied three times as fast."""
    return x.permute(0, 2, 3, 1).view(len(x), -1)


def _like_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    _, channels, height, width = like.shape
    return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)


def _look(eye: Eye, x: Tensor, seen: Seen) -> Seen:
    """What the eye sees; an exit's looks at those alone that have not left, which stand first."""
    if not isinstance(eye, ExitEye) or seen is None:
        return eye(x, seen)
    before, said = seen
    number, score = int((before > eye.past).sum()), torch.full_like(before, -torch.inf)
    if number > 0:
        score[:number], said[:number] = eye(x[:number], None)
    return score, said


def _looks_back(later: Iterable[FoldedBlock]) -> bool:
    """Whether what was seen so far is looked at again: by the next block that has an eye or a head."""
    block = next((block for block in later if block.eye is not None or block.head is not None), None)
    return block is not None and (block.eye is None or block.eye.carries)


class SkippingNetwork:
    """Class scores of images (B, C, H, W).

    With `workers` the micro-batches are shared out to that many threads, each of which computes alone: no two threads
    wait for one another at every layer. `leading` computes what `Leading` does, in a form that a compiler made of it.
    """

    def __init__(
        self,
        network: FoldedNetwork,
        micro_batch: int = MICRO_BATCH,
        workers: int = 0,
        leading: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.network = network.eval().to(memory_format=torch.channels_last)
        self.stem, self.blocks = FusedConv(network.stem), [RuntimeBlock(block) for block in network.blocks]
        self.removed = [place for place, block in enumerate(network.blocks) if block.removed]
        self.leading, self.led = leading, 0 if leading is None else len(Leading(network).blocks)
        self.looked_back = [_looks_back(network.blocks[place + 1 :]) for place in range(len(network.blocks))]
        self.exits = any(isinstance(block.eye, ExitEye) for block in network.blocks)
        self.micro_batch = micro_batch
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) if workers else None
        self.is_plain = all(block.head is None and block.eye is None for block in network.blocks)
        self._gates: Tensor | None = None
        self._number = 0  # of images of the last call

    @property
    def gates(self) -> Tensor:
        """What the last call decided, (B, N) over the blocks."""
        if self._gates is None:
            self._gates = torch.ones(self._number, len(self.blocks), dtype=torch.bool)
            self._gates[:, self.removed] = False
        return self._gates

    @torch.inference_mode()
    def prepare(self, image: Tensor) -> None:
        """Meets every number of samples of which a gated block can be given, for images like this one (1, C, H, W):
        oneDNN makes a convolution anew for each, which takes as long as some ten images, and keeps the last thousand.
        """
        self.network.check(image)
        x = self.enter(image.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            if block.block.routes:
                for number in range(1, min(self.micro_batch, PREPARED) + 1):
                    block.full(x.repeat(number, 1, 1, 1).contiguous(memory_format=torch.channels_last))
            x = block.block(x)

    def enter(self, images: Tensor) -> Tensor:
        """What the first block is given."""
        x = self.stem(images)
        return x if self.network.pool is None else self.network.pool(x)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        self.network.check(images)
        self._gates, self._number = None, len(images)
        if self.is_plain and self.leading is None and 0 < len(images) <= self.micro_batch:
            return self._run_plain(images)
        if len(images) == 0:
            return images.new_zeros(0, self.network.classes)
        parts = images.split(self.micro_batch), self.gates.split(self.micro_batch)
        return torch.cat(list((self.pool.map if self.pool else map)(self._run, *parts)))

    def _run_plain(self, images: Tensor) -> Tensor:
        """The same without gates, in as few calls as can be: for one image each takes as long as any other."""
        x = self.enter(images.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            if not block.block.removed:
                x = block.full(x)
            elif not block.is_identity:
                x = block.block.identity(x)
        head = self.network.head
        return head(x.mean((2, 3))) if isinstance(head, nn.Linear) else self.network.classify(x)

    @torch.inference_mode()
    def _run(self, images: Tensor, gates: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        x, seen = self.enter(images) if self.leading is None else self.leading(images), self.network.begin(images)
        places = Places()
        for place, block in list(enumerate(self.blocks))[self.led :]:
            if block.block.eye is not None:
                seen = _look(block.block.eye, x, seen)
            x = block(x, seen, places, gates[:, place])
            if self.looked_back[place]:
                seen = places.follow(seen)
        scores = self.network.classify(x)
        if self.exits:
            scores = self.network.answer(scores, places.follow(seen))
        return places.in_own_places(scores)
