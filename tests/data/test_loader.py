import pytest
import torch

from cosinegate.data.loader import Augmentation, EpochOrder, EvalLoader, Normalisation, TrainLoader

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
CPU = torch.device("cpu")


def data(size=23, rng=None):
    rng = rng or torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (size, 6, 5, 3), dtype=torch.uint8, generator=rng)
    return images, torch.arange(size)  # a label that tells which image it was


def loader(size=23, seed=0, epoch=0, padding=2, flip=True, batch_size=8, drop_last=False, rank=0, world_size=1):
    order = EpochOrder(size, seed, Augmentation(padding, flip))
    order.set_epoch(epoch)
    return TrainLoader(*data(size), Normalisation(MEAN, STD, CPU), batch_size, drop_last, order, rank, world_size)


def slow_image(image, top, left, flipped, padding):
    """Pads with black, crops, flips and normalises one image (H, W, C), pixel by pixel."""
    height, width, channels = image.shape
    out = torch.zeros(channels, height, width)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                source_x = width - 1 - x if flipped else x
                row, column = top + y - padding, left + source_x - padding
                inside = 0 <= row < height and 0 <= column < width
                value = int(image[row, column, c]) / 255 if inside else 0.0
                out[c, y, x] = (value - MEAN[c]) / STD[c]
    return out


def test_a_batch_equals_the_slow_form_image_by_image():
    loading = loader()
    drawn = loading.sampler.draw()
    assert drawn.flipped.any()
    assert not drawn.flipped.all()
    assert set(drawn.corner.unique().tolist()) == {0, 1, 2, 3, 4}
    images, _ = data()
    place = 0
    for batch, labels in loading:
        assert batch.is_contiguous(memory_format=torch.channels_last)
        for picture, label in zip(batch, labels, strict=True):
            assert label == drawn.order[place]
            expected = slow_image(images[label], *drawn.corner[place].tolist(), drawn.flipped[place].item(), padding=2)
            torch.testing.assert_close(picture, expected, rtol=1e-5, atol=1e-5)
            place += 1
    assert place == 23


def test_without_augmentation_an_image_is_only_normalised():
    for batch, labels in loader(padding=0, flip=False):
        for picture, label in zip(batch, labels, strict=True):
            torch.testing.assert_close(picture, slow_image(data()[0][label], 0, 0, False, 0), rtol=1e-5, atol=1e-5)


def test_same_seed_and_epoch_give_the_same_batches_and_others_do_not():
    def epoch_of(**which):
        return torch.cat([batch for batch, _ in loader(**which)])

    assert torch.equal(epoch_of(seed=3, epoch=5), epoch_of(seed=3, epoch=5))
    assert not torch.equal(epoch_of(seed=3, epoch=5), epoch_of(seed=3, epoch=6))
    assert not torch.equal(epoch_of(seed=3, epoch=5), epoch_of(seed=4, epoch=5))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [8, 8, 7]), (True, [8, 8])])
def test_every_image_comes_once_and_the_last_batch_as_asked(drop_last, sizes):
    loading = loader(drop_last=drop_last)
    labels = [labels for _, labels in loading]
    assert [len(part) for part in labels] == sizes
    assert len(loading) == len(sizes)
    assert len(torch.cat(labels).unique()) == sum(sizes)


@pytest.mark.parametrize("size", [23, 25, 24])
def test_processes_share_each_global_batch(size):
    whole = list(loader(size))
    shares = [list(loader(size, rank=rank, world_size=2)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1])  # or the gradients' exchange would wait for ever
    for step, pair in enumerate(zip(*shares, strict=True)):
        images, labels = (torch.cat(parts) for parts in zip(*pair, strict=True))
        assert torch.equal(images, whole[step][0])
        assert torch.equal(labels, whole[step][1])
    left_out = len(whole) - len(shares[0])
    assert left_out == (1 if size == 25 else 0)  # one image cannot be shared by two


def test_evaluation_shares_cover_every_image_once_in_order():
    images, labels = data()
    normalise = Normalisation(MEAN, STD, CPU)
    alone = torch.cat([part for _, part in EvalLoader(images, labels, normalise, 8)])
    assert torch.equal(alone, labels)
    shares = [torch.cat([part for _, part in EvalLoader(images, labels, normalise, 4, r, 3)]) for r in range(3)]
    assert torch.equal(torch.cat(shares).sort().values, labels)
