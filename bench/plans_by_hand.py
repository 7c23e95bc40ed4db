"""Five jobs counted by hand: operations, bytes and seconds, for bench/plans.py to compare with what `hybridflow plan` says.

It was written by somebody who had not read the planner, from the models' configs, the placements and caches that the plans
have, and the figures that a plan prints as assumed. It imports nothing of hybridflow. Since then the caches of the second and
third plan, which it takes for given, CUDA graphs that stay between the phases, and prompts that a group shares in training and
reading were brought up to date.
"""

from __future__ import annotations

import json

GB = 1e9
US = 1e-6
# Achieved fractions of the peaks.
MATRIX, HBM, LINK = 0.5, 0.8, 0.8
PIECE = 2**28  # logits (fp32) the head makes at a time
MICRO_TOKENS = 16384  # most tokens of a micro-batch
GRAPHS = 1e9  # CUDA graphs, which stay as the engine does

H100 = dict(peak=989e12, hbm=3350e9, nvlink=450e9)
H200 = dict(peak=989e12, hbm=4800e9, nvlink=450e9)

S7 = dict(
    h=3584,
    ffn=18944,
    layers=28,
    heads=28,
    kv=4,
    d=128,
    vocab=152064,
    tied=False,
    experts=0,
    active=0,
    qkv_bias=True,
    qk_norm=False,
)
S70 = dict(
    h=8192,
    ffn=28672,
    layers=80,
    heads=64,
    kv=8,
    d=128,
    vocab=128256,
    tied=False,
    experts=0,
    active=0,
    qkv_bias=False,
    qk_norm=False,
)
S30 = dict(
    h=2048,
    ffn=768,
    layers=48,
    heads=32,
    kv=4,
    d=128,
    vocab=151936,
    tied=False,
    experts=128,
    active=8,
    qkv_bias=False,
    qk_norm=True,
)
S05 = dict(
    h=896,
    ffn=4864,
    layers=24,
    heads=14,
    kv=2,
    d=64,
    vocab=151936,
    tied=True,
    experts=0,
    active=0,
    qkv_bias=True,
    qk_norm=False,
)

# roles: name -> (trained?, head outputs: "vocab" or "value")
GRPO = dict(actor=(True, "vocab"), ref=(False, "vocab"))
PPO = dict(
    actor=(True, "vocab"), critic=(True, "value"), ref=(False, "vocab"), reward=(False, "value")
)
PLANS = [
    dict(
        name="7b_grpo 8xH100",
        s=S7,
        gpu=H100,
        n=8,
        net=400e9,
        tp=2,
        pp=1,
        cache=24.38e9,
        prompt=1024,
        resp=3072,
        ckpt=True,
        roles=GRPO,
        group=8,
        read=["ref"],
        train=["actor"],
        steps=1,
    ),
    dict(
        name="70b_ppo 64xH100",
        s=S70,
        gpu=H100,
        n=64,
        net=400e9,
        tp=8,
        pp=4,
        cache=7.40e9,
        prompt=1024,
        resp=1024,
        ckpt=True,
        roles=PPO,
        group=1,
        read=["reward", "ref", "actor", "critic"],
        train=["actor", "critic"],
        steps=4,
    ),
    dict(
        name="30b_a3b_grpo 16xH100",
        s=S30,
        gpu=H100,
        n=16,
        net=400e9,
        tp=4,
        pp=1,
        cache=9.35e9,
        prompt=1024,
        resp=3072,
        ckpt=True,
        roles=GRPO,
        group=8,
        read=["ref"],
        train=["actor"],
        steps=1,
    ),
    dict(
        name="30b_a3b_grpo 16xH200",
        s=S30,
        gpu=H200,
        n=16,
        net=400e9,
        tp=2,
        pp=1,
        cache=25.87e9,
        prompt=1024,
        resp=3072,
        ckpt=True,
        roles=GRPO,
        group=8,
        read=["ref"],
        train=["actor"],
        steps=1,
    ),
    dict(
        name="05b_grpo 1xH200",
        s=S05,
        gpu=H200,
        n=1,
        net=400e9,
        tp=1,
        pp=1,
        cache=55.41e9,
        prompt=512,
        resp=1024,
        ckpt=False,
        roles=dict(actor=(True, "vocab")),
        group=8,
        read=[],
        train=["actor"],
        steps=1,
    ),
]
SEQS = 1024


# ---- weights ------------------------------------------------------------------
def attention_matrices(s):  # q, k, v, o
    return s["h"] * s["heads"] * s["d"] * 2 + s["h"] * s["kv"] * s["d"] * 2


def expert(s):  # gate, up, down of one expert (or of the dense MLP)
    return 3 * s["h"] * s["ffn"]


def layer_weights(s):  # everything of a layer: what is held and gathered
    w = attention_matrices(s) + 2 * s["h"]  # + two norms
    if s["qkv_bias"]:
        w += (s["heads"] + 2 * s["kv"]) * s["d"]
    if s["qk_norm"]:
        w += 2 * s["d"]
    if s["experts"]:
        return w + s["experts"] * expert(s) + s["h"] * s["experts"]  # + router
    return w + expert(s)


def layer_active(s):  # the matrices a token goes through: what is multiplied
    if s["experts"]:
        return attention_matrices(s) + s["active"] * expert(s) + s["h"] * s["experts"]
    return attention_matrices(s) + expert(s)


def ends(s, head):  # (embedding, separate head) in weights
    emb = s["vocab"] * s["h"]
    if head == "value":
        return emb, s["h"]
    return emb, (0 if s["tied"] else emb)


def params(s, head):
    return s["layers"] * layer_weights(s) + sum(ends(s, head)) + s["h"]  # + final norm


# ---- FLOPs of one forward pass of one sequence ----------------------------------
def layers_flops(s, length):  # 2 per weight and token, and causal attention (half attended)
    return s["layers"] * length * (2 * layer_active(s) + 4 * s["heads"] * s["d"] * length / 2)


def sequence_flops(p):
    """Of a sequence in training or reading: its share of the group's prompt, and its response."""
    s, g, P, R = p["s"], p["group"], p["prompt"], p["resp"]
    pairs = P * P / 2 / g + R * P + R * R / 2  # a response sees all of the prompt
    tokens = P / g + R
    return s["layers"] * (tokens * 2 * layer_active(s) + 4 * s["heads"] * s["d"] * pairs)


def sequence_tokens(p):
    return p["prompt"] / p["group"] + p["resp"]


def head_flops(s, head, tokens):
    return 2 * s["h"] * (s["vocab"] if head == "vocab" else 1) * tokens


# ---- collectives: (bandwidth, latency) of a ring -------------------------------
def ring(p, ranks):
    """A ring inside a node runs at NVLink's rate. One through several nodes crosses each
    node's border once, so one stream has the node's network: the slower of the two."""
    if ranks <= 8:
        return LINK * p["gpu"]["nvlink"], 3 * US
    return LINK * min(p["gpu"]["nvlink"], p["net"]), 20 * US


def scatter_or_gather(p, total_bytes, pieces):  # over all n ranks, in `pieces` calls
    n = p["n"]
    if n == 1:
        return 0.0
    rate, lat = ring(p, n)
    return total_bytes * (n - 1) / n / rate + pieces * (n - 1) * lat


# ---- micro-batches --------------------------------------------------------------
def micro(p, seqs_of_a_rank):
    """(number, sequences in each): the largest divisor of the rank's share that fits."""
    fit = max(1, int(MICRO_TOKENS / sequence_tokens(p)))
    size = max(k for k in range(1, fit + 1) if seqs_of_a_rank % k == 0)
    return seqs_of_a_rank // size, size


# ---- seconds --------------------------------------------------------------------
def read_seconds(p, role):  # forward only, all 1024 sequences
    s, head = p["s"], p["roles"][role][1]
    mine = SEQS // p["n"]
    m, _ = micro(p, mine)
    flops = mine * (sequence_flops(p) + head_flops(s, head, p["resp"]))
    # m gathers of the whole model, one call per layer and one for embedding + norm + head
    comm = m * scatter_or_gather(p, 2 * params(s, head), s["layers"] + 1)
    return flops / (MATRIX * p["gpu"]["peak"]) + comm


def train_seconds(p, role):  # all optimizer steps
    s, head = p["s"], p["roles"][role][1]
    P = params(s, head)
    mine = SEQS // p["steps"] // p["n"]
    m, size = micro(p, mine)
    logits = size * p["resp"] * (s["vocab"] if head == "vocab" else 1)
    layers_x = 4 if p["ckpt"] else 3  # forward + [recompute] + backward (2)
    head_x = 4 if logits > PIECE else 3
    flops = mine * (layers_x * sequence_flops(p) + head_x * head_flops(s, head, p["resp"]))
    comm = m * (
        2 * scatter_or_gather(p, 2 * P, s["layers"] + 1)
        + scatter_or_gather(p, 4 * P, s["layers"] + 1)
    )
    # AdamW: read gradient (4), read and write master (8) and two moments (16): 28 bytes a weight
    adam = 28 * P / p["n"] / (HBM * p["gpu"]["hbm"])
    return p["steps"] * (flops / (MATRIX * p["gpu"]["peak"]) + comm + adam)


def generate(p):
    s, tp, pp, g = p["s"], p["tp"], p["pp"], p["gpu"]
    engines = p["n"] // (tp * pp)
    share = SEQS // engines
    kv_token = 2 * 2 * s["d"] * max(1, s["kv"] / tp) * (s["layers"] / pp)  # bytes on one device
    fit = int(p["cache"] // (kv_token * (p["prompt"] + p["resp"])))
    b = min(256, share, fit)
    group = b / pp  # sequences in one stage at a time
    turns = share / b
    # weights a device (of the last, slowest stage: it has the head) reads for one group
    w = layer_weights(s)
    if s["experts"]:
        touched = 1 - (1 - s["active"] / s["experts"]) ** group
        w -= (1 - touched) * s["experts"] * expert(s)
    head_w = s["vocab"] * s["h"]
    weights = 2 * (w * s["layers"] / pp + head_w) / tp
    length = p["prompt"] + p["resp"] / 2
    memory = (pp * weights + b * kv_token * length) / (HBM * g["hbm"])
    flops = (
        b
        * (s["layers"] / pp * (2 * layer_active(s) + 4 * s["heads"] * s["d"] * length) + 2 * head_w)
        / tp
    )
    compute = flops / (MATRIX * g["peak"])
    # tp: 2 all-reduces per layer per group; layers/pp of a stage x pp groups = all layers
    rate, lat = ring(p, tp)
    hidden = group * s["h"] * 2
    reduces = (
        0.0
        if tp == 1
        else 2 * s["layers"] * (2 * (tp - 1) / tp * hidden / rate + 2 * (tp - 1) * lat)
    )
    # pp: a stage sends each group on once, the tp ranks a slice each over the node's network
    sends = 0.0 if pp == 1 else pp * (20 * US + hidden / (LINK * p["net"]))
    work = 25 * US * b
    step = max(memory, compute) + reduces + sends + work
    decode = step * p["resp"] * turns
    # prefill: all prompts of the engine, the head for the last token only
    pre = (
        share
        * (layers_flops(s, p["prompt"]) + head_flops(s, "vocab", 1))
        / (tp * pp)
        / (MATRIX * g["peak"])
    )
    # not in the sum (the brief names only FLOPs): prefill's all-reduces
    pre_comm = (
        0.0
        if tp == 1
        else 2 * s["layers"] / pp * share * p["prompt"] * s["h"] * 2 * 2 * (tp - 1) / tp / rate
    )
    # transfer of the bf16 weights: a rank lacks (n-1)/n of its engine shard
    lacks = 2 * params(s, "vocab") / (tp * pp) * (1 - 1 / p["n"])
    moved = lacks / (LINK * g["nvlink"]) if p["n"] <= 8 else 8 * lacks / (LINK * p["net"])
    parts = dict(
        b=b,
        fit=fit,
        turns=turns,
        kv_token=kv_token,
        memory_ms=memory * 1e3,
        compute_ms=compute * 1e3,
        reduces_ms=reduces * 1e3,
        sends_ms=sends * 1e3,
        work_ms=work * 1e3,
        step_ms=step * 1e3,
        decode_s=decode,
        prefill_s=pre,
        prefill_reduces_s_not_counted=pre_comm,
        transfer_s=moved,
    )
    return decode + pre + moved, parts


# ---- bytes ----------------------------------------------------------------------
def layer_activations(s):  # bytes a token, all that one layer keeps for its backward pass
    inter = s["ffn"] * (s["active"] if s["experts"] else 1)
    return 16 * s["h"] + 2 * (2 * (s["heads"] + s["kv"]) * s["d"] + 4 * inter)


def layer_no_grad(s):  # bytes a token, the most alive at once: residual + normed (fp32, bf16) and
    inter = s["ffn"] * (
        s["active"] if s["experts"] else 1
    )  # q, k before/after rotation or 3 MLP tensors
    return 8 * s["h"] + max(4 * (s["heads"] + s["kv"]) * s["d"], 6 * inter)


def gathered(s, head):
    return 2 * (2 * layer_weights(s) + sum(ends(s, head)))


def piece(s, head, tokens):
    return 4 * min(PIECE, tokens * (s["vocab"] if head == "vocab" else 1))


def read_bytes(p, role):
    s, head = p["s"], p["roles"][role][1]
    _, size = micro(p, SEQS // p["n"])
    tokens = size * sequence_tokens(p)
    in_layer = tokens * layer_no_grad(s)
    in_head = tokens * 2 * s["h"] + 2.5 * piece(s, head, size * p["resp"])
    return gathered(s, head) + max(in_layer, in_head)  # never at the same time


def train_bytes(p, role):
    s, head = p["s"], p["roles"][role][1]
    emb, separate = ends(s, head)
    m, size = micro(p, SEQS // p["steps"] // p["n"])
    tokens = size * sequence_tokens(p)
    shard_grads = 4 * params(s, head) / p["n"]
    before = shard_grads if m > 1 else 0  # from earlier micro-batches
    kept = tokens * s["layers"] * (2 * s["h"] if p["ckpt"] else layer_activations(s))
    head_w = separate or emb
    # A: the head works backward, all layers' kept tensors alive, 3 fp32 pieces + its weights' gradient
    a = kept + 3 * piece(s, head, size * p["resp"]) + 2 * head_w
    # B: the last layer works backward: its full activations (again), its gradients bf16 + fp32
    b = (
        kept
        + (tokens * layer_activations(s) if p["ckpt"] else 0)
        + 6 * layer_weights(s)
        + 2 * head_w
    )
    # C: the end: embedding and head gradients bf16 + fp32, gradient shards whole, no activations
    c = 6 * (emb + separate) + (shard_grads - before)
    return gathered(s, head) + before + max(a, b, c), "ABC"[(a, b, c).index(max(a, b, c))]


def count(p):
    s = p["s"]
    rest = sum(
        (12 if trained else 2) * params(s, head) / p["n"] for trained, head in p["roles"].values()
    )
    emb, separate = ends(s, "vocab")
    # engine's bf16 shard on the fullest stage (the end ones: an embedding or a head more)
    end = (emb + separate) if p["pp"] == 1 else max(emb, separate)
    engine = 2 * (s["layers"] * layer_weights(s) / p["pp"] + end) / p["tp"]
    gen, parts = generate(p)
    inf = {r: read_seconds(p, r) for r in p["read"]}
    tra = {r: train_seconds(p, r) for r in p["train"]}
    stay = rest + engine + p["cache"] + GRAPHS
    reading = stay + max([read_bytes(p, r) for r in p["read"]], default=0) if p["read"] else None
    training = {r: train_bytes(p, r) for r in p["train"]}
    return dict(
        name=p["name"],
        parameters=params(s, "vocab"),
        generation_s=gen,
        inference_s=sum(inf.values()),
        training_s=sum(tra.values()),
        step_s=gen + sum(inf.values()) + sum(tra.values()),
        rest_gb=rest / GB,
        generating_gb=stay / GB,
        reading_gb=reading and reading / GB,
        training_gb=(stay + max(v[0] for v in training.values())) / GB,
        detail=dict(
            engine_gb=engine / GB,
            inference=inf,
            training=tra,
            generation=parts,
            training_moment={r: (v[0] / GB, v[1]) for r, v in training.items()},
            micro_read=micro(p, SEQS // p["n"]),
            micro_train=micro(p, SEQS // p["steps"] // p["n"]),
        ),
    )


def rounded(x):
    if isinstance(x, float):
        return round(x, 4)
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


if __name__ == "__main__":
    for plan in PLANS:
        print(json.dumps(rounded(count(plan))))
