"""A server of grpcio.aio that answers every call with the same bytes: what gRPC costs there before a decision is made.

    python -m benchmarks.grpc_peer PORT METHOD ANSWER        ANSWER in hexadecimal digits

It runs on uvloop, as the service does, and neither reads nor writes protocol buffers: the handler could not do less.
"""

import sys

import grpc
import uvloop


class SameAnswer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """The handler of one method."""

    def __init__(self, method: str, answer: bytes) -> None:
        self._method = method
        self._answer = answer

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(self._call) if call.method == self._method else None

    async def _call(self, request: bytes, context: object) -> bytes:
        return self._answer


async def serve(port: int, method: str, answer: bytes) -> None:
    """Serve until the process ends."""
    server = grpc.aio.server(handlers=[SameAnswer(method, answer)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])))
