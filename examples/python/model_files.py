"""The two file formats that generate.py reads: safetensors, and the tokenizer of llama2.c."""
import json
import struct
from pathlib import Path

import numpy as np

# numpy has no bfloat16: those tensors come as their bits.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}


def read_safetensors(path):
    """All tensors of a file by name: 8 bytes of header length, a JSON header, then the data."""
    contents = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8:8 + length])
    header.pop("__metadata__", None)
    data = memoryview(contents)[8 + length:]
    return {name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()}


class Tokenizer:
    """Byte-pair encoding after llama2.c: an int32 (longest token), then a float32 score, an int32 length and the bytes
    of each token. Tokens 3 to 258 are the single bytes, for what the vocabulary cannot spell."""
    BOS, EOS, FIRST_BYTE = 1, 2, 3

    def __init__(self, path):
        contents = Path(path).read_bytes()
        self.pieces, self.scores, at = [], [], 4
        while at < len(contents):
            score, length = struct.unpack_from("<fi", contents, at)
            self.pieces.append(contents[at + 8:at + 8 + length])
            self.scores.append(score)
            at += 8 + length
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text):
        """BOS and the tokens of " " + text: of all neighbours that make a token together, the best first."""
        tokens = []
        for character in " " + text:
            piece = character.encode()
            tokens += [self.ids[piece]] if piece in self.ids else [self.FIRST_BYTE + byte for byte in piece]
        while True:
            merges = [(self.scores[self.ids[pair]], -i) for i in range(len(tokens) - 1)
                      if (pair := self.pieces[tokens[i]] + self.pieces[tokens[i + 1]]) in self.ids]
            if not merges:
                return [self.BOS] + tokens
            i = -max(merges)[1]
            tokens[i:i + 2] = [self.ids[self.pieces[tokens[i]] + self.pieces[tokens[i + 1]]]]

    def decode(self, tokens):
        """The text of tokens that begin with BOS."""
        pieces = [bytes([token - self.FIRST_BYTE]) if self.FIRST_BYTE <= token < self.FIRST_BYTE + 256
                  else self.pieces[token] for token in tokens[1:]]
        return b"".join(pieces).removeprefix(b" ").decode(errors="replace")
