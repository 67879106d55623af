"""The schedule of a process group: which rank reads which part of the requested tensors."""

import random
import unittest

import numpy as np

import package  # noqa: F401
from tensorfs import _requests
from tensorfs._requests import Want, chunk_of, schedule


def random_box(choose, shape):
    box = []
    for size in shape:
        start = choose.choice([0, 0, choose.randint(0, size)])
        box.append((start, choose.choice([size, choose.randint(start, size)])))
    return tuple(box)


def random_wants(choose, size):
    """The shape of each tensor, and the requests of each rank."""
    shapes = [[choose.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(choose.randint(0, 4))] for _ in range(6)]
    wants = {rank: [] for rank in range(size)}
    for rank in wants:
        for position, shape in enumerate(shapes):
            whole = tuple((0, one) for one in shape)
            shard = list(whole)
            if shape:
                dim = choose.randrange(len(shape))
                shard[dim] = chunk_of(shape[dim], size, rank)
            box = choose.choice([whole, whole, tuple(shard), random_box(choose, shape)])
            if choose.random() < 0.8:
                wants[rank].append(Want(position, box, choose.choice([None, None, "F32"]), choose.choice([32, 32, 32, 4])))
    return shapes, wants


class Schedules(unittest.TestCase):
    def test_each_rank_gets_every_byte_that_it_asks_for_once_and_none_else(self):
        choose = random.Random(7)
        for _ in range(80):
            size, limit = choose.choice([1, 2, 3, 4, 9]), choose.choice([16, 100, 5000])
            shapes, wants = random_wants(choose, size)
            made = schedule(wants, shapes.__getitem__, limit, size)
            filled = {(rank, want): np.zeros(want.nbytes, int) for rank in wants for want in wants[rank] if want.nbytes}
            for by_rank in (made.alone, made.shared):
                for reader, pieces in by_rank.items():
                    for piece in pieces:
                        self.assertIn(reader, piece.ranks)
                        self.assertEqual(by_rank is made.alone, piece.ranks == [reader])
                        for one, part in piece.reads(shapes[piece.position]):
                            self.assertTrue(one.offset <= part.offset <= part.offset + part.nbytes <= one.offset + one.nbytes)
                            for rank in one.ranks:
                                filled[rank, one.want][part.offset : part.offset + part.nbytes] += 1
            for key, counts in filled.items():
                self.assertTrue((counts == 1).all(), (key, counts))

    def test_the_bytes_of_a_segment_follow_each_other_in_the_memory_of_its_want(self):
        choose = random.Random(8)
        for _ in range(60):
            shapes, wants = random_wants(choose, 3)
            made = schedule(wants, shapes.__getitem__, 64, 3)
            for one in (one for by_rank in made for several in by_rank.values() for piece in several for one in piece.segments):
                if one.want.bits != 32:
                    continue
                shape = [stop - start for start, stop in one.want.box]
                held = np.arange(one.want.nbytes // 4).reshape(shape)
                part = held[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(one.box, one.want.box))]
                right = np.arange(one.nbytes // 4) + one.offset // 4
                np.testing.assert_array_equal(part.reshape(-1), right)

    def test_no_byte_of_a_tensor_is_read_by_two_ranks(self):
        wants = {rank: [Want(0, ((0, 1000), (0, 64)), None, 16)] for rank in range(4)}
        made = schedule(wants, lambda _: [1000, 64], 4096, 4)
        rows = sorted(one.box[0] for several in made.shared.values() for piece in several for one in piece.segments)
        self.assertEqual(rows[0][0], 0)
        self.assertEqual(rows[-1][1], 1000)
        self.assertTrue(all(stop == start for (_, stop), (start, _) in zip(rows, rows[1:])))

    def test_ranks_that_want_everything_read_about_the_same_number_of_bytes(self):
        sizes = [3, 1000, 1000, 50_000, 77, 12_345, 9]
        wants = {rank: [Want(p, ((0, n), (0, 8)), None, 16) for p, n in enumerate(sizes)] for rank in range(4)}
        made = schedule(wants, lambda p: [sizes[p], 8], 1 << 14, 4)
        read = [sum(piece.nbytes for piece in several) for several in made.shared.values()]
        self.assertLess(max(read) - min(read), 2 << 14)
        self.assertEqual(sum(read), sum(sizes) * 16)

    def test_rows_of_different_ranks_are_read_by_those_who_want_them(self):
        wants = {rank: [Want(0, (chunk_of(10, 4, rank), (0, 6)), None, 32)] for rank in range(4)}
        made = schedule(wants, lambda _: [10, 6], 1 << 20, 4)
        self.assertFalse(any(made.shared.values()))
        self.assertEqual([len(made.alone[rank]) for rank in range(4)], [1, 1, 1, 1])

    def test_columns_of_different_ranks_are_read_in_rows_by_one_and_long_ones_by_each(self):
        def made(shape):
            wants = {rank: [Want(0, ((0, shape[0]), chunk_of(shape[1], 2, rank)), None, 32)] for rank in range(2)}
            return schedule(wants, lambda _: shape, 1 << 16, 2)

        self.assertFalse(any(made([64, 100]).alone.values()))
        self.assertFalse(any(made([2, 1 << 20]).shared.values()))

    def test_a_round_is_no_longer_than_its_limit(self):
        choose = random.Random(9)
        for _ in range(100):
            size, limit = choose.choice([2, 3, 5]), 256
            shapes, wants = random_wants(choose, size)
            made = schedule(wants, shapes.__getitem__, limit, size)
            seen = 0
            for by_rank in made.rounds(limit, size):
                kinds = set()
                for pieces in by_rank.values():
                    self.assertTrue(sum(piece.weight(size) for piece in pieces) <= limit)
                    kinds |= {all(len(one.ranks) == size for one in piece.segments) for piece in pieces}
                    seen += len(pieces)
                self.assertEqual(len(kinds), 1)
            self.assertEqual(seen, sum(map(len, made.shared.values())))

    def test_a_message_has_the_requests_that_were_sent(self):
        _, wants = random_wants(random.Random(10), 2)
        self.assertEqual(_requests.decoded(_requests.encoded(wants[0])), wants[0])

    def test_chunks_are_those_of_torch_also_with_more_ranks_than_rows(self):
        self.assertEqual([chunk_of(10, 4, rank) for rank in range(4)], [(0, 3), (3, 6), (6, 9), (9, 10)])
        self.assertEqual([chunk_of(2, 4, rank) for rank in range(4)], [(0, 1), (1, 2), (2, 2), (2, 2)])
        self.assertEqual([chunk_of(5, 4, rank) for rank in range(4)], [(0, 2), (2, 4), (4, 5), (5, 5)])
        self.assertEqual(chunk_of(0, 3, 2), (0, 0))


if __name__ == "__main__":
    unittest.main()
