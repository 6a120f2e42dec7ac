"""What the tests of several ranks run, and a server that runs it: importing all this takes seconds, forking does not.

Results are left in a directory, as files that the test compares with what one rank computes.
"""

import gc
import importlib
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from transformers import AutoModel

from storage.clock import SystemClock
from storage.digests import digest_of
from storage.records.run import read_plan
from storage.stores.local import LocalStore
from storage.stores.metered import MeteredStore
from storage.stores.store import StoreUnavailable
from storage.weights import tensor_sets
from tasks.configuration.lora import LoraConfig
from tasks.configuration.run_config import parse
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import checkpoint, generation
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.batching import idle_batch
from tasks.learning.checkpoint import TrainerState
from tasks.learning.faster_passes import pack_models
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.packing import pack
from tasks.learning.parking import park, relocate, unpark
from tasks.learning.policy import Policy
from tasks.learning.ranks import joined
from tasks.learning.restoring import optimizer_of
from tasks.learning.scoring import Valuer
from tasks.learning.sharded import OwnRows, add_nothing, as_sharded, own_part, part_of, skeleton
from tasks.learning.shared_reading import read_shared
from tasks.learning.train_iteration import train_iteration
from tasks.learning.trained_model import TrainedModel, read_architecture
from tasks.sampling.engines.weight_tensors import DTYPES, as_block
from tasks.sampling.session.seeding_member import seed
from tasks.sharing.phase_trainer import PhaseTrainer
from tests.small_run import EXECUTION
from tests.tasks.learning.mixture_programs import mixture
from tests.tasks.learning.rank_batches import OPTIMIZER, micro_batch, passes_of, train, train_by_loss
from tests.tasks.learning.refusing_kernels import attention_without_backward
from tests.tasks.learning.tiny_model import write_model

DRAWS = 60
# Many times what a collective takes on a busy machine.
COLLECTIVE_MAX_S = 4.0


def new_policy(directory, ranks, *, tied=True, trainable=True, **config):
    model = directory / f"model{ranks.rank}{tied}"
    model.mkdir(exist_ok=True)
    tensors = write_model(model, tied=tied)
    return Policy(model, tensors, TrainerConfig(device="cpu", **config), trainable=trainable, ranks=ranks)


def values(directory, ranks, **config):
    """The norm of a value model's gradient, for the sum of all values."""
    model = directory / f"model{ranks.rank}True"
    with skeleton(ranks):
        body = AutoModel.from_config(read_architecture(model), dtype=torch.float32)
    tensors = {name: tensor for name, tensor in write_model(model).items() if name != "lm_head.weight"}
    tensors |= {"value_head.weight": torch.ones(1, 32), "value_head.bias": torch.zeros(1)}
    settings = TrainerConfig(device="cpu", **config)
    module = Valuer(body)
    critic = TrainedModel(module, tensors, settings, uncopied=[module.value_head], ranks=ranks)
    for positions in passes_of(ranks):
        if positions:
            critic.module(micro_batch(0, positions)).sum().backward()
        else:
            add_nothing(critic.module(idle_batch(critic.device)))
    outcome = PolicyOptimizer(critic.parameters(), OPTIMIZER).step(1.0)
    return outcome.grad_norm


def save(store, prefix, policy, optimizer, ranks):
    torch.manual_seed(0)  # How many numbers were drawn for a model that was thrown away is not the subject.
    state = TrainerState.capture(optimizer.steps, optimizer)
    manifest = checkpoint.save(store, prefix, policy, optimizer, state, ranks, object_bytes_max=20_000)
    return list(manifest.objects)


def everything(directory, ranks):
    """Steps and checkpoints of each kind of model; what is not in the store is returned."""
    store = LocalStore(directory / "store")
    found = {}
    for tied in (True, False):
        policy = new_policy(directory, ranks, tied=tied, gradient_checkpointing=not tied)
        optimizer = PolicyOptimizer(policy.parameters(), OPTIMIZER)
        found[f"objects {tied}"] = save(store, f"{ranks.world_size}/{tied}/0/", policy, optimizer, ranks)
        with torch.no_grad():
            found[f"logprobs {tied}"] = policy.logprobs(micro_batch(0, [0, 1]), 1.0)[0].tolist()
        found[f"steps {tied}"] = train(policy, optimizer, ranks, range(2))
        save(store, f"{ranks.world_size}/{tied}/", policy, optimizer, ranks)
    packed = new_policy(directory, ranks)
    pack(packed.module)
    found["packed"] = train(packed, PolicyOptimizer(packed.parameters(), OPTIMIZER), ranks, range(2))
    refused = new_policy(directory, ranks)
    optimizer = PolicyOptimizer(refused.parameters(), OPTIMIZER)
    with attention_without_backward():
        pack_models(Learner(refused, optimizer, None, None, ranks))
    found["refused"] = train(refused, optimizer, ranks, range(2))
    half = new_policy(directory, ranks, dtype="bfloat16")
    optimizer = PolicyOptimizer(half.parameters(), OPTIMIZER)
    found["bfloat16"] = train(half, optimizer, ranks, range(1))
    held = [*half.parameters().values(), *optimizer.state_tensors()]
    found["dtypes"] = sorted({str(tensor.dtype) for tensor in held})
    found["local"] = sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in half.parameters().values())
    model = directory / f"model{ranks.rank}True"
    stored = {name: tensor.bfloat16() for name, tensor in write_model(model).items()}
    settings = TrainerConfig(device="cpu", dtype="bfloat16")
    adapted = AdaptedPolicy(model, stored, settings, LoraConfig(rank=4), seed=1, ranks=ranks)
    found["adapted"] = train(adapted, PolicyOptimizer(adapted.parameters(), OPTIMIZER), ranks, range(1))
    found["adapted dtypes"] = {str(value.dtype): ".lora_" in name for name, value in adapted.state().items()}
    found["adapted published"] = [tensor.sum(dtype=torch.float64).item() for tensor in adapted.tensors().values()]
    reference = new_policy(directory, ranks, trainable=False)
    for name in ("clip", "tests.own_losses:clipped"):
        found[f"loss {name}"] = train_by_loss(name, new_policy(directory, ranks), ranks)
    found["reference"] = reference.logprobs(micro_batch(0, [0, 1]), 1.0)[0].tolist()
    found["values"] = values(directory, ranks)
    found["values bfloat16"] = values(directory, ranks, dtype="bfloat16")
    return found


def resumed(directory, ranks, source):
    """One more step from the checkpoint below `source`, saved below "<source>then<world_size>/"."""
    store = LocalStore(directory / "store")
    policy = new_policy(directory, ranks)
    optimizer = PolicyOptimizer(policy.parameters(), OPTIMIZER)
    checkpoint.restore(checkpoint.read(store, source, ranks), policy, optimizer)
    measured = train(policy, optimizer, ranks, range(2, 3))
    save(store, f"{source}then{ranks.world_size}/", policy, optimizer, ranks)
    return measured


def updated(directory, ranks, name, offload, source=None):
    """Two steps with gradients that do not depend on the ranks, from a new model or the checkpoint below `source`.

    Saved below "<optimizer>/<offload>/<source><world_size>/", which is returned.
    """
    store = LocalStore(directory / "store")
    policy = new_policy(directory, ranks)
    config = replace(OPTIMIZER, name=name, max_grad_norm=1e9)
    optimizer = optimizer_of(policy, config, TrainerConfig(device="cpu", offload=offload))
    if source:
        checkpoint.restore(checkpoint.read(store, source, ranks), policy, optimizer)
    for step in range(optimizer.steps, optimizer.steps + 2):
        generator = torch.Generator().manual_seed(step)
        for parameter in policy.parameters().values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = as_sharded(part_of(gradient, parameter), parameter, tuple(parameter.shape))
        optimizer.step(1.0)
    prefix = f"{name}/{offload}/{source or ''}{ranks.world_size}/"
    save(store, prefix, policy, optimizer, ranks)
    return prefix


def read_together(directory, ranks, source):
    """The bytes that this rank read of a checkpoint and then holds, and the digests of all its tensors."""
    store = MeteredStore(LocalStore(directory / "store"))
    saved = checkpoint.read(store, source, ranks)
    sets = (saved.parameters, *saved.moments.values())
    tensors = [tensor for kind in sets for tensor in kind.values()]
    digests = [digest_of(whole_of(tensor).numpy().tobytes()) for tensor in tensors]
    return {"bytes": store.requests.bytes_read, "held": sum(tensor.nbytes for tensor in tensors), "digests": digests}


def whole_of(tensor):
    return tensor.whole() if isinstance(tensor, OwnRows) else tensor


def drawn_tensors(seed):
    """Tensors of any shapes and dtypes, as large as a chunk of one or as small as nothing, by name."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit):
        return int(torch.randint(0, limit, (), generator=generator))

    drawn = {}
    for number in range(below(12)):
        shape = [below(14) for _ in range(below(4))]
        dtype = list(DTYPES.values())[below(len(DTYPES))]
        bits = torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=generator, dtype=torch.uint8)
        drawn[f"t{number}"] = bits.to(dtype)
    return drawn


def deal_drawn(directory, ranks, draws):
    """Read drawn tensors together; for each draw, the bytes read and held here, and which rows are not torch's own."""
    found = []
    for draw in range(draws):
        tensors, prefix = drawn_tensors(draw), f"drawn/{ranks.world_size}/{draw}/"
        if ranks.is_first:
            blocks = {name: as_block(tensor) for name, tensor in tensors.items()}
            tensor_sets.publish(LocalStore(directory / "store"), prefix, blocks, {}, object_bytes_max=64)
        ranks.barrier()
        store = MeteredStore(LocalStore(directory / "store"))
        manifest = tensor_sets.read_manifest(store, prefix)
        before = store.requests.bytes_read
        dealt = read_shared(ranks, manifest.tensors, partial(tensor_sets.pull_some, store, prefix, manifest))
        wrong = []
        for name, tensor in tensors.items():
            chunks = torch.chunk(tensor, ranks.world_size) if tensor.dim() else [tensor] * ranks.world_size
            mine = chunks[ranks.rank] if ranks.rank < len(chunks) else tensor[:0]
            rows = dealt[name].rows if isinstance(dealt[name], OwnRows) else dealt[name]
            whole = whole_of(dealt[name])
            if not (torch.equal(rows, mine) and rows.dtype == mine.dtype and torch.equal(whole, tensor)):
                wrong.append(name)
        held = sum(tensor.nbytes for tensor in dealt.values())
        scalars = sum(tensor.nbytes for tensor in tensors.values() if not tensor.dim())
        stored = sum(tensor.nbytes for tensor in tensors.values())
        read = store.requests.bytes_read - before
        found.append({"wrong": wrong, "held": held, "scalars": scalars, "stored": stored, "read": read})
    return found


def poisoned_copy(tensor):
    """The same in other memory, as on another device; whatever still uses the old memory learns nothing but nan."""
    own = own_part(tensor).detach()
    copied = own.clone()
    if own.is_floating_point():
        own.fill_(math.nan)
    if not isinstance(tensor, DTensor):
        return copied
    place = {"device_mesh": tensor.device_mesh, "placements": tensor.placements, "run_check": False}
    return DTensor.from_local(copied, **place, shape=tensor.shape, stride=tensor.stride())


def park_often(directory, ranks, relocated):
    """Steps between which the learner is parked and, if `relocated`, moved to other memory and back.

    Returns digests of all tensors of its policy, critic and optimizers, what the steps measured, and the state of
    torch's generator after ranks have drawn unlike many numbers.
    """
    policy, reference = new_policy(directory, ranks), new_policy(directory, ranks, trainable=False)
    optimizer = PolicyOptimizer(policy.parameters(), OPTIMIZER)
    learner = Learner(policy, optimizer, reference, None, ranks)
    measured = []
    for step in range(3):
        measured += train(policy, optimizer, ranks, [step])
        torch.rand(1 + ranks.rank)
        parked = park(learner)
        if relocated:
            relocate(learner, poisoned_copy)
            held = {name: digest_of(tensor.numpy().tobytes()) for name, tensor in policy.each_tensor()}
            relocate(learner, poisoned_copy)
        else:
            held = {name: digest_of(tensor.numpy().tobytes()) for name, tensor in policy.each_tensor()}
        unpark(parked)
    with torch.no_grad():
        logprobs = reference.logprobs(micro_batch(0, [0, 1]), 1.0)[0].tolist()
    digests = [digest_of(tensor.numpy().tobytes()) for _, tensor in optimizer.each_moment()]
    drawn = digest_of(torch.get_rng_state().numpy().tobytes())
    return {"steps": measured, "held": held, "moments": digests, "logprobs": logprobs, "bytes": parked.num_bytes}, drawn


def wait_long_for_the_first(directory):
    """Seed where only the first rank has a slot, and takes longer than any collective may."""

    def begins_late(*arguments):
        if arguments[3].rank == 0:
            time.sleep(1.5 * COLLECTIVE_MAX_S)
        return seed(*arguments)

    generation.seed = begins_late
    store = LocalStore(directory)
    plan = read_plan(store, 0)
    with joined(torch.device("cpu")) as ranks:
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_MAX_S))
        generating = generation.Generation(store, plan, parse(plan.config), "test", SystemClock(), ranks)
        generating.begin()
        metrics = generating.metrics()
        (directory / f"seed{ranks.rank}.json").write_text(json.dumps(metrics))
        _set_pg_timeout(timedelta(minutes=10))


def train_phase(directory, ranks, lost_by):
    """Read the state for iteration 0 ahead, lose it on one rank (None: on none), and train; what this rank said."""
    said = []
    trainer = PhaseTrainer(str(directory), SystemClock(), said.append, ranks=ranks)
    trainer.prefetch(0)
    if ranks.rank == lost_by:
        trainer._kept = None
    trainer.train(0)
    (directory / f"phase {lost_by}{ranks.rank}.json").write_text(json.dumps([state.phase for state in said]))


def train_unread(directory, ranks, victim):
    """Read the state for iteration 0 ahead while the store gives rank `victim` no tensor; then train."""

    def no_answer(*_):
        raise StoreUnavailable("no answer")

    trainer = PhaseTrainer(str(directory), SystemClock(), lambda _: None, ranks)
    if ranks.rank == victim:
        trainer._store.get_into = no_answer
    trainer.prefetch(0)
    vars(trainer._store).pop("get_into", None)
    trainer.train(0)


def run(what, directory):
    """One rank's part of `what`."""
    if what == "seed":
        wait_long_for_the_first(directory)
        return
    if what.startswith("train_iteration "):
        train_iteration(str(directory), int(what.removeprefix("train_iteration ")), EXECUTION, SystemClock())
        return
    with joined(torch.device("cpu")) as ranks:
        kind, _, argument = what.partition(" ")
        if kind == "phase":
            train_phase(directory, ranks, None if argument == "None" else int(argument))
        elif kind == "unread":
            train_unread(directory, ranks, int(argument))
        elif kind == "updated":
            updated(directory, ranks, argument, "none")
            updated(directory, ranks, argument, "optimizer", f"{argument}/none/1/")
        if argument:
            return
        if what == "park":
            found, drawn = zip(*(park_often(directory, ranks, relocated) for relocated in (False, True)), strict=True)
            (directory / f"{what}{ranks.rank}.json").write_text(json.dumps({"found": found, "drawn": drawn}))
            return
        if what in ("deal", "mixture"):
            mixed = what == "mixture" and mixture(directory, ranks, train, micro_batch(0, [0, 1]))
            found = mixed or deal_drawn(directory, ranks, DRAWS)
            (directory / f"{what}{ranks.rank}.json").write_text(json.dumps(found))
            return
        found = everything(directory, ranks)
        found |= {"resumed": resumed(directory, ranks, "1/True/"), "read": read_together(directory, ranks, "1/True/")}
        (directory / f"{what}{ranks.rank}.json").write_text(json.dumps(found))


def forked_rank(what, directory, environment):
    """The process id of a rank, whose output is in a file of the directory."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(environment)
        with (directory / f"{what}{environment['RANK']}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(what, directory)
        status = 0
    except BaseException:  # noqa: BLE001 - the rank's whole life
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def launch(what, directory, count):
    """Exit statuses of `count` ranks, in the order in which they ended; the first failure ends the others."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": str(count)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    living = {forked_rank(what, directory, address | place) for place in places}
    statuses = []
    while living:
        child, status = os.wait()
        living.discard(child)
        statuses.append(os.waitstatus_to_exitcode(status))
        for other in living if statuses[-1] else ():
            os.kill(other, signal.SIGKILL)
    return statuses


if __name__ == "__main__":
    # What each rank would else import, and look through, anew.
    for module in ("pandas", "peft", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    # A request is a line with the arguments of `launch`, an answer is a line with its result.
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        name, folder, number = json.loads(line)
        print(json.dumps(launch(name, Path(folder), number)), file=answers, flush=True)
