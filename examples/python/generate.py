#!/usr/bin/env python3
"""Tells a story with stories260K, a Llama of 260,000 parameters, whose norms and feed-forward layers layerd computes.

Embedding, attention and the choice of the next token are numpy, here. Each of the 5 blocks asks the daemon for two
norms and a feed-forward layer, and the model for one last norm: 16 calls a token. The weights go with each call; with
--resident the daemon has them already, and calls name their layer. With --local numpy computes the layers too, in
float64 rounded to float32 once a layer. The story is the same.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

import grpc
import numpy as np

import layerd_stubs
from model_files import Tokenizer, read_safetensors

DEADLINE_S = 10
MAX_MESSAGE_BYTES = 64 << 20  # grpcio's own limit for answers is 4 MiB; the daemon's is --max_message_mib
SHARED = Path(os.environ.get("LAYERD_TEST_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared")


class LayersOfDaemon:
    """Norms and feed-forward layers by the daemon at `server`."""

    def __init__(self, server):
        self.stubs = layerd_stubs.load()
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                   ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                   ("grpc.enable_http_proxy", 0)]  # the daemon is near; http_proxy in the environment is for the web
        self.service = self.stubs.layer_service_grpc.LayerServiceStub(grpc.insecure_channel(server, options))
        self.calls = 0

    def call(self, method, request):
        self.calls += 1
        try:
            return layerd_stubs.to_array(self.stubs, method(request, timeout=DEADLINE_S).output)
        except grpc.RpcError as error:
            sys.exit(layerd_stubs.explain(self.stubs, error))


class ServedLayers(LayersOfDaemon):
    """With weights and options in each call."""

    def __init__(self, server, weights, epsilon):
        super().__init__(server)
        self.weights = {name: layerd_stubs.to_tensor(self.stubs, weight) for name, weight in weights.items()}
        pb = self.stubs.layer_service
        self.norm_spec = pb.NormalizeSpec(kind=pb.NORM_KIND_RMS_NORM, epsilon=epsilon)
        self.swiglu_spec = pb.FeedForwardSpec(
            form=pb.FEED_FORWARD_FORM_GATED, activation=pb.ACTIVATION_SILU,
            packing=pb.GATE_UP_PACKING_SEPARATE, layout=pb.WEIGHT_LAYOUT_OUT_IN)

    def norm(self, name, x):
        return self.call(self.service.Normalize, self.stubs.layer_service.NormalizeRequest(
            input=layerd_stubs.to_tensor(self.stubs, x), spec=self.norm_spec, gamma=self.weights[f"{name}.weight"]))

    def feed_forward(self, name, x):
        matrices = {part: self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        return self.call(self.service.FeedForward, self.stubs.layer_service.FeedForwardRequest(
            input=layerd_stubs.to_tensor(self.stubs, x), spec=self.swiglu_spec,
            weights=self.stubs.layer_service.FeedForwardWeights(**matrices)))


class ResidentLayers(LayersOfDaemon):
    """By name: the daemon has the model among its --models, or in its --layer_store."""

    def __init__(self, server, model):
        super().__init__(server)
        self.prefix = f"models/{model}/layers/"

    def norm(self, name, x):
        return self.call(self.service.Normalize, self.stubs.layer_service.NormalizeRequest(
            input=layerd_stubs.to_tensor(self.stubs, x), layer=self.prefix + name))

    def feed_forward(self, name, x):
        return self.call(self.service.FeedForward, self.stubs.layer_service.FeedForwardRequest(
            input=layerd_stubs.to_tensor(self.stubs, x), layer=self.prefix + name))


class LocalLayers:
    """The same by numpy."""

    def __init__(self, weights, epsilon):
        self.weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.epsilon = epsilon
        self.calls = 0

    def norm(self, name, x):
        x = x.astype(np.float64)
        return (x / np.sqrt(np.mean(x * x) + self.epsilon) * self.weights[f"{name}.weight"]).astype(np.float32)

    def feed_forward(self, name, x):
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x.astype(np.float64)
        g = gate @ x
        return (down @ (g / (1 + np.exp(-g)) * (up @ x))).astype(np.float32)


class Llama:
    """One token at a time; the keys and values of the tokens before are kept."""

    def __init__(self, config, weights, layers):
        self.weights, self.layers, self.num_layers = weights, layers, config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["hidden_size"] // self.heads
        self.frequencies = config["rope_theta"] ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.keys, self.values = ([[] for _ in range(self.num_layers)] for _ in range(2))

    def next_logits(self, token):
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[token]
        for i in range(self.num_layers):
            block = f"model.layers.{i}"
            x = x + self.attention(i, self.layers.norm(f"{block}.input_layernorm", x))
            x = x + self.layers.feed_forward(f"{block}.mlp", self.layers.norm(f"{block}.post_attention_layernorm", x))
        return embedding @ self.layers.norm("model.norm", x)

    def attention(self, i, x):
        q, k, v, o = (self.weights[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkvo")
        position = len(self.keys[i])
        self.keys[i].append(self.rotate((k @ x).reshape(self.kv_heads, self.head_dim), position))
        self.values[i].append((v @ x).reshape(self.kv_heads, self.head_dim))
        # Two heads of queries share a head of keys and values: [kv_heads, 2, head_dim] meets [kv_heads, head_dim, t].
        queries = self.rotate((q @ x).reshape(self.heads, self.head_dim), position)
        queries = queries.reshape(self.kv_heads, -1, self.head_dim)
        scores = queries @ np.stack(self.keys[i]).transpose(1, 2, 0) / np.float32(np.sqrt(self.head_dim))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = scores / scores.sum(axis=-1, keepdims=True) @ np.stack(self.values[i]).transpose(1, 0, 2)
        return o @ mixed.reshape(-1)

    def rotate(self, x, position):
        """RoPE; the two halves of a head are the coordinates, as Hugging Face orders them."""
        cos, sin = (f(position * self.frequencies).astype(np.float32) for f in (np.cos, np.sin))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="127.0.0.1:50051", help="address of layerd (%(default)s)")
    parser.add_argument("--resident", metavar="MODEL", help="call layers by name: the daemon has them as models/MODEL")
    parser.add_argument("--local", action="store_true", help="no server: numpy computes every layer")
    parser.add_argument("--prompt", default="Once upon a time", help="how the story begins (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add to it (%(default)s)")
    parser.add_argument("--model", type=Path, default=SHARED / "data" / "stories260k", help="folder of the model")
    parser.add_argument("--save", metavar="FILE.npz", help="write `tokens` and the `logits` of each step")
    args = parser.parse_args()

    config = json.loads((args.model / "config.json").read_text())
    weights = read_safetensors(args.model / "stories260k.f32.safetensors")
    tokenizer = Tokenizer(args.model / "tok512.bin")
    epsilon = config["rms_norm_eps"]
    if args.local:
        layers = LocalLayers(weights, epsilon)
    elif args.resident:
        layers = ResidentLayers(args.server, args.resident)
    else:
        layers = ServedLayers(args.server, weights, epsilon)
    llama = Llama(config, weights, layers)

    tokens = tokenizer.encode(args.prompt)
    end = len(tokens) + args.tokens
    if end > config["max_position_embeddings"]:
        parser.error(f"expected at most {config['max_position_embeddings']} tokens with the prompt, got {end}")
    logits, start = [], time.monotonic()
    while len(tokens) < end:
        logits.append(llama.next_logits(tokens[len(logits)]))
        if len(logits) == len(tokens):  # the prompt is read
            best = int(np.argmax(logits[-1]))
            if best in (Tokenizer.BOS, Tokenizer.EOS):
                break
            tokens.append(best)
    seconds = time.monotonic() - start

    print(tokenizer.decode(tokens))
    print(f"{len(logits)} tokens in {seconds:.2f} s, {layers.calls} calls", file=sys.stderr)
    if args.save:
        np.savez(args.save, tokens=tokens, logits=logits)


if __name__ == "__main__":
    main()
