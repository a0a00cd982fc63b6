"""A stateless shuffled order: each element is computed independently."""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 4


class Permutation:
    """A pseudo-random permutation of `range(count)` that depends on (count, seed, name) alone.

    A Feistel network permutes the next power of four; numbers that fall outside are permuted again
    until they fall inside ("cycle walking"; Black and Rogaway, 2002, "Ciphers with Arbitrary Finite
    Domains"). So the cost does not depend on the number of tasks, and a resume starts immediately.

    Example:
        >>> order = Permutation(5, seed=1, name="epoch 0")
        >>> sorted(order[place] for place in range(5))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, *, seed: int, name: str) -> None:
        self._count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._key = blake2b(f"{seed}:{name}".encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._count:
            raise IndexError(f"place {place} of a permutation of {self._count}")
        number = self._scramble(place)
        while number >= self._count:
            number = self._scramble(number)
        return number

    def _scramble(self, number: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (self._digest(turn, right) & mask)
        return left << self._half_bits | right

    def _digest(self, turn: int, half: int) -> int:
        data = half.to_bytes(8, "little")
        digest = blake2b(data, digest_size=8, key=self._key, salt=bytes([turn]))
        return int.from_bytes(digest.digest(), "little")
