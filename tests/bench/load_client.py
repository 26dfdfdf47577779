"""A closed loop of stock asyncio gRPC callers, the same for every server: only the messages differ.

Prints "measuring" when the warm-up is over, then one JSON object. Messages of ours come from the contract's descriptors
(--descriptors: a FileDescriptorSet), Triton's from its tritonclient package. Requests are 32 matrices 4 x 4, 20
iterations; each caller's first answer is compared with float64.
"""

import argparse
import asyncio
import json
import pathlib
import time

import grpc
import numpy as np

SHAPE = (32, 4, 4)
ITERATIONS = 20
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Ours:
    method = "/sinkhorn.v1.SinkhornService/Solve"

    def __init__(self, descriptors):
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(descriptors).read_bytes()).file:
            pool.Add(file)

        def message(name):
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"sinkhorn.v1.{name}"))

        self.Request, self.Reply = message("SolveRequest"), message("SolveResponse")

    def request(self, logits):
        request = self.Request()
        tensor = request.normalization.logits
        tensor.dtype = 1  # FLOAT32
        tensor.shape.extend(logits.shape)
        tensor.data = logits.tobytes()
        request.solver.max_iterations = ITERATIONS
        return request

    def plan(self, reply):
        return np.frombuffer(reply.plan.data, np.float32)

    def batch(self, reply):
        return reply.execution.batch_problem_count


class Triton:
    method = "/inference.GRPCInferenceService/ModelInfer"

    def __init__(self, _):
        from tritonclient.grpc import service_pb2

        self.Request, self.Reply = service_pb2.ModelInferRequest, service_pb2.ModelInferResponse

    def request(self, logits):
        request = self.Request(model_name="sinkhorn")
        tensor = request.inputs.add(name="LOGITS", datatype="FP32")
        tensor.shape.extend((1, *logits.shape))
        request.raw_input_contents.append(logits.tobytes())
        return request

    def plan(self, reply):
        return np.frombuffer(reply.raw_output_contents[0], np.float32)

    def batch(self, reply):
        return 0  # It does not say.


class Empty:
    """The floor: what gRPC alone costs on both sides. A health check of our server: nothing in, two bytes out."""

    method = "/grpc.health.v1.Health/Check"

    class Request:
        @staticmethod
        def SerializeToString(_):
            return b""

    class Reply:
        @staticmethod
        def FromString(data):
            return data

    def __init__(self, _):
        pass

    def request(self, _):
        return None

    def plan(self, _):
        return None

    def batch(self, _):
        return 0


def normalized(logits):
    log_plan = logits.astype(np.float64)
    for _ in range(ITERATIONS):
        for axis in (2, 1):
            log_plan = log_plan - np.log(np.exp(log_plan).sum(axis, keepdims=True))
    return np.exp(log_plan)


async def caller(seed, server, call, clock, seconds, errors, batches):
    """One client: its next request when the last is answered."""
    logits = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    expected = normalized(logits).ravel()
    checked = False
    while (start := time.perf_counter()) < clock["end"]:
        try:
            reply = await call(server.request(logits))
            plan = server.plan(reply)
        except grpc.aio.AioRpcError as error:
            errors[error.code().name] = errors.get(error.code().name, 0) + 1
            await asyncio.sleep(0.01)
            continue
        stop = time.perf_counter()
        if not checked and plan is not None:
            assert np.abs(plan - expected).max() < 1e-5, "the answer is wrong"
            checked = True
        if start >= clock["begin"] and stop <= clock["end"]:
            seconds.append(stop - start)
            batches.append(server.batch(reply))


async def load(arguments):
    server = {"ours": Ours, "triton": Triton, "empty": Empty}[arguments.kind](arguments.descriptors)
    async with grpc.aio.insecure_channel(arguments.target, OPTIONS) as channel:
        call = channel.unary_unary(
            server.method,
            request_serializer=server.Request.SerializeToString,
            response_deserializer=server.Reply.FromString,
        )
        now = time.perf_counter()
        clock = {"begin": now + arguments.warmup, "end": now + arguments.warmup + arguments.seconds}
        seconds, errors, batches = [], {}, []

        async def announce():
            await asyncio.sleep(arguments.warmup)
            print("measuring", flush=True)

        callers = [caller(i, server, call, clock, seconds, errors, batches) for i in range(arguments.clients)]
        await asyncio.gather(announce(), *callers)
    milliseconds = 1e3 * np.array(seconds)
    p50, p99 = np.percentile(milliseconds, [50, 99]) if seconds else (None, None)
    return {
        "requests": len(seconds),
        "requests_per_second": len(seconds) / arguments.seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "batch": float(np.mean(batches)) if seconds else 0,
        "errors": errors,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("ours", "triton", "empty"), required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--descriptors")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=1)
    parser.add_argument("--seconds", type=float, default=3)
    print(json.dumps(asyncio.run(load(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
