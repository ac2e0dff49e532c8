"""Short ways to write messages in the tests of the coordinator."""

from collections.abc import Mapping, Sequence

from horovod.base.proofs import rejoin_proof
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.protos.v1 import membership_pb2, negotiation_pb2
from horovod.protos.v1 import types_pb2 as pb

FLOAT32, FLOAT64, INT64 = pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_FLOAT64, pb.DATA_TYPE_INT64
ALLREDUCE, ALLGATHER = pb.OPERATION_TYPE_ALLREDUCE, pb.OPERATION_TYPE_ALLGATHER
BROADCAST, ALLTOALL = pb.OPERATION_TYPE_BROADCAST, pb.OPERATION_TYPE_ALLTOALL
REDUCESCATTER, BARRIER = pb.OPERATION_TYPE_REDUCESCATTER, pb.OPERATION_TYPE_BARRIER
AVERAGE, SUM, MIN = pb.REDUCE_OP_AVERAGE, pb.REDUCE_OP_SUM, pb.REDUCE_OP_MIN
CPU, GPU = pb.DEVICE_KIND_CPU, pb.DEVICE_KIND_GPU


def op(
    name: str = "allreduce.x",
    kind: pb.OperationType.ValueType = ALLREDUCE,
    *,
    dtype: pb.DataType.ValueType = FLOAT32,
    shape: Sequence[int] = (2, 3),
    tensors: Sequence[tuple[pb.DataType.ValueType, Sequence[int]]] | None = None,
    reduce_op: pb.ReduceOp.ValueType = AVERAGE,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    device: pb.DeviceKind.ValueType = CPU,
) -> pb.Operation:
    if tensors is None:
        tensors = () if kind == BARRIER else ((dtype, shape),)
    return pb.Operation(
        name=name,
        type=kind,
        tensors=[pb.TensorSpec(dtype=one, shape=its_shape) for one, its_shape in tensors],
        reduce_op=reduce_op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        root_rank=root,
        process_set=process_set,
        device=device,
    )


def message(
    announce: Sequence[pb.Operation] = (),
    blocked: Sequence[pb.Operation] = (),
    recalled: Sequence[int] = (),
    epoch: int = 1,
    hello: negotiation_pb2.Hello | None = None,
    waited_s: Sequence[float] = (),
) -> negotiation_pb2.NegotiationMessage:
    answers = [negotiation_pb2.RecallAnswer(process_set=0, ids=recalled)] if recalled else []
    return negotiation_pb2.NegotiationMessage(
        epoch=epoch, hello=hello, announce=announce, blocked=blocked, blocked_seconds=waited_s, recalled=answers
    )


def request(
    member_id: str,
    *,
    job: str = "digits",
    size: int = 2,
    host: str = "node-a",
    domain: str = "",
    pid: int = 0,
    rank: int | None = None,
    options: Mapping[str, str] | None = None,
    version: int = PROTOCOL_VERSION,
    namespace: str = "",
    start_time: int = 0,
    rejoin: tuple[membership_pb2.World, int] | None = None,
    sizes: tuple[int, int] | None = None,
    settle_s: float = 0.0,
    incarnation: int = 0,
    state: tuple[int, int] = (0, 0),
    begins_anew: bool = False,
    patience_s: float = 0.0,
    release: str = "",
) -> membership_pb2.JoinRequest:
    """rejoin: the world that the process was in, and its rank there, which it proves. sizes: of an elastic job; for
    `size` members its first world waits. state: the commits that it holds, and the epoch that it is of.
    """
    proof = None
    if rejoin is not None:
        world, old_rank = rejoin
        proof = membership_pb2.Rejoin(
            epoch=world.epoch,
            rank=old_rank,
            proof=rejoin_proof(world.secret, job, world.epoch, old_rank, member_id),
        )
    return membership_pb2.JoinRequest(
        rejoin=proof,
        process=membership_pb2.ProcessIdentity(namespace=namespace, start_time=start_time),
        protocol_version=version,
        version=release,
        job=job,
        member_id=member_id,
        size=size,
        host=membership_pb2.HostIdentity(name=host, shared_memory_domain=domain or host),
        requested_rank=rank,
        pid=pid or 1000 + sum(member_id.encode()),
        endpoints=[pb.Endpoint(address="127.0.0.1", port=4000)],
        segment_address=f"segment of {member_id}",
        options=options or {},
        sizes=membership_pb2.Sizes(fewest=sizes[0], most=sizes[1]) if sizes else None,
        settle_seconds=settle_s,
        incarnation=incarnation,
        commits=state[0],
        state_epoch=state[1],
        begins_anew=begins_anew,
        patience_seconds=patience_s,
    )


def attach_request(joined: membership_pb2.JoinRequest, world: membership_pb2.World) -> membership_pb2.Attach:
    ranks = [member.member_id for member in world.members]
    return membership_pb2.Attach(
        protocol_version=PROTOCOL_VERSION,
        job=joined.job,
        epoch=world.epoch,
        member_id=joined.member_id,
        rank=ranks.index(joined.member_id),
        pid=joined.pid,
        process=joined.process,
    )
