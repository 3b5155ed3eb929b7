"""The order of samples: complete, reproducible, and the same at any world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.sdk import ConfigError
from everstep.trainer.data import END_OF_FILE, Windows, prepare_bytes
from everstep.trainer.order import Shuffle, expand, share, take

windows = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40)).map(lambda w: (w[0], w[0] + w[1])),
    max_size=6,
)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    indices = np.arange(epoch * size, (epoch + 1) * size)
    assert sorted(Shuffle(size, seed)(indices)) == list(range(size))


def test_epochs_and_seeds_differ_and_an_index_does_not_depend_on_its_batch() -> None:
    shuffle = Shuffle(1000, 1)
    one, two = shuffle(np.arange(1000)), shuffle(np.arange(1000, 2000))
    assert (one != two).mean() > 0.9
    assert (one != Shuffle(1000, 2)(np.arange(1000))).mean() > 0.9
    across = shuffle(np.arange(990, 1010))
    assert across.tolist() == [*one[990:].tolist(), *two[:10].tolist()]
    assert abs(np.corrcoef(np.arange(1000), one)[0, 1]) < 0.1


@given(cursor=st.integers(0, 100), count=st.integers(0, 50), skip=windows)
def test_taking_leaves_out_what_is_skipped_and_nothing_else(
    cursor: int, count: int, skip: list[tuple[int, int]]
) -> None:
    skipped = {i for start, stop in skip for i in range(start, stop)}
    expected = [i for i in range(cursor, cursor + 500) if i not in skipped][:count]
    ranges, after = take(cursor, count, skip)
    assert expand(ranges).tolist() == expected
    following, _ = take(after, 5, skip)
    assert (
        expand(following).tolist()
        == [i for i in range(cursor, cursor + 500) if i not in skipped][count : count + 5]
    )


@given(cursor=st.integers(0, 100), skip=windows, world=st.sampled_from([1, 2, 3, 4, 6]))
def test_shares_put_together_are_the_whole_batch(
    cursor: int, skip: list[tuple[int, int]], world: int
) -> None:
    ranges, _ = take(cursor, 12, skip)
    parts = [expand(share(ranges, rank, world)).tolist() for rank in range(world)]
    assert [len(part) for part in parts] == [12 // world] * world
    assert [i for part in parts for i in part] == expand(ranges).tolist()


def write(tmp_path: Path, *texts: bytes) -> Path:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    prepare_bytes(reversed(list(tmp_path.glob("*.txt"))), tmp_path / "out.bin")
    return tmp_path / "out.bin"


def test_windows_are_the_text_with_the_next_token_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path, b"abcdefgh", b"ijk")
    data = Windows(path, seq_len=4, seed=3, vocabulary=256)
    assert data.count == 3
    rows = [bytes(row.astype(np.uint8)) for row in data.batch(np.arange(3))]
    assert END_OF_FILE == 0
    assert sorted(rows) == [b"\0ijk\0", b"abcde", b"efgh\0"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: p.with_name("out.bin.json").unlink(), "prepare_bytes"),
        (lambda p: p.write_bytes(b"short"), "cut short"),
        (lambda p: p.with_name("out.bin.json").write_text("{"), "not a token header"),
        (lambda p: p.unlink(), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_trained_on_says_why(
    spoil: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    path = write(tmp_path, b"some text that is long enough")
    spoil(path)
    with pytest.raises(ConfigError, match=told):
        Windows(path, seq_len=4, seed=3, vocabulary=256)


def test_text_that_is_too_short_or_a_vocabulary_too_small_say_so(tmp_path: Path) -> None:
    path = write(tmp_path, b"abc")
    with pytest.raises(ConfigError, match="do not fill one window"):
        Windows(path, seq_len=4, seed=3, vocabulary=256)
    with pytest.raises(ConfigError, match="vocabulary = 256"):
        Windows(path, seq_len=1, seed=3, vocabulary=100)
    with pytest.raises(ConfigError, match="no files to pack"):
        prepare_bytes([], tmp_path / "none.bin")
