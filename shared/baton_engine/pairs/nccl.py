"""A communicator of two ranks over NCCL, which sends KV from one GPU to another.

NCCL is called through ctypes. torch.distributed could do the same, but it needs a store that both processes reach. Here
the id travels in the messages that the two pods exchange anyway, and a pair can be aborted while its process goes on.
Sources: NCCL's user guide, "Creating a communicator with options", "Point-to-point communication" and "Fault
tolerance".
"""

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from baton_common.rank_parts import UNIQUE_ID_BYTES

log = logging.getLogger(__name__)

_SUCCESS, _IN_PROGRESS = 0, 7
_BYTES = 0  # ncclInt8
_MAGIC, _CONFIG_VERSION, _UNDEFINED = 0xCAFEBEEF, 21700, -(2**31)
_SETUP_S = 20.0
_CALL_S = 2.0
_POLL_S = 0.002
_SPIN_S = 0.001  # NCCL queues an operation some 100 us after the call; a sleep would take milliseconds
_FIRST_BYTES = 1 << 20
# A piece takes milliseconds. If a transfer takes this long, the peer is gone, and the pod's link will notice it too.
TRANSFER_S = 5.0
_WATCH_S = 0.5


class NcclError(RuntimeError):
    """NCCL has failed, or the peer is gone. The communicator cannot be used any more."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]  # not c_char, whose value ends at the first zero byte


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Later versions of NCCL accept it, because they read its size and version first."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


@cache
def _library() -> Any:
    """Return the NCCL library that comes with torch. Raises OSError when there is none."""
    # Over NVLink, 16 channels are as fast as NCCL's default of 32, and each pair takes 80 to 208 MiB less memory.
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "16")
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    handle, pointer = ctypes.c_void_p, ctypes.c_void_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(handle), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [handle, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [handle]
    for call in (library.ncclSend, library.ncclRecv):
        call.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, handle, pointer]
    return library


def available(device: torch.device) -> bool:
    """Return whether a device can be one end of a communicator."""
    if device.type != "cuda":
        return False
    try:
        _library()
    except OSError:
        return False
    return True


def gpu_ids(device: torch.device, count: int) -> list[str]:
    """Return ids of `count` GPUs from the given one on, unique among all machines."""
    first = device.index or 0
    return [str(torch.cuda.get_device_properties(first + number).uuid) for number in range(count)]


def make_unique_id() -> bytes:
    """Return the id by which two ranks find each other. This process must run until they have done so."""
    unique_id = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return ctypes.string_at(ctypes.byref(unique_id), UNIQUE_ID_BYTES)


def warm_up(device: torch.device) -> None:
    """Let NCCL detect the hardware. This takes a second, and would otherwise delay the first communicator."""
    handle = ctypes.c_void_p()
    try:
        with torch.cuda.device(device):
            _check(_init(handle, 1, make_unique_id(), 0, blocking=True))
            _check(_library().ncclCommAbort(handle))
    except NcclError as error:
        log.warning("NCCL cannot be used: %s", error, extra={"event": "nccl_failed"})


def _init(handle: ctypes.c_void_p, ranks: int, unique_id: bytes, rank: int, blocking: bool) -> int:
    config = _Config(
        ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, blocking, _UNDEFINED, _UNDEFINED, _UNDEFINED, None, _UNDEFINED
    )
    id = _UniqueId.from_buffer_copy(unique_id)
    code: int = _library().ncclCommInitRankConfig(ctypes.byref(handle), ranks, id, rank, ctypes.byref(config))
    return code


class Transfer:
    """A send or receive that NCCL has accepted. behind: launches the work that belongs to it and runs after it."""

    def __init__(self, behind: Callable[[], None] | None) -> None:
        self._behind = behind
        self._over: torch.cuda.Event | None = None

    def queued(self, stream: torch.cuda.Stream) -> None:
        if self._behind is not None:
            with torch.cuda.stream(stream):
                self._behind()
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._over.record(stream)

    def query(self) -> bool:
        """Return whether the message has been sent or received, and the work behind it is done."""
        return self._over is not None and self._over.query()  # type: ignore[no-untyped-call]


class Communicator:
    """Rank 0 sends to rank 1. Setup and the first message take a while, so they run in the background.

    Sends and receives are matched in the order of the calls: each `send` needs a `receive` of the same size.
    """

    def __init__(self, rank: int, unique_id: bytes, device: torch.device) -> None:
        self.failure: str | None = None  # why the communicator cannot be used any more
        self.up = False
        self.gone = False  # closed, and no transfer is running any more
        # Requests wait for the KV of these transfers, so they run before the kernels of a step.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._rank, self._device = rank, device
        self._handle = ctypes.c_void_p()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # NCCL allows one call at a time for a communicator
        self._unqueued: Transfer | None = None  # the transfer of the last call, until NCCL has queued it
        self._under_way: deque[tuple[float, Transfer]] = deque()
        threading.Thread(target=self._set_up, args=(unique_id,), daemon=True).start()

    def send(self, values: torch.Tensor) -> Transfer:
        """Send a contiguous tensor. It must not change until the transfer is over. Raises NcclError."""
        return self._transfer(_library().ncclSend, values, None)

    def receive(self, values: torch.Tensor, behind: Callable[[], None] | None) -> Transfer:
        """Receive into a contiguous tensor. behind: as in Transfer. Raises NcclError."""
        return self._transfer(_library().ncclRecv, values, behind)

    def check(self) -> None:
        """Ask NCCL for its progress and for a failure that it has detected. No transfer ends without this call."""
        # If another thread holds the lock, it is aborting the communicator.
        if self.up and self.failure is None and self._lock.acquire(blocking=False):
            try:
                self._has_queued()
            except NcclError as error:
                self.failure = str(error)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Abort the communicator and its transfers. They have ended when `gone` is true."""
        self.up = False
        self._closed.set()
        threading.Thread(target=self._abort, daemon=True).start()

    def _set_up(self, unique_id: bytes) -> None:
        try:
            torch.cuda.set_device(self._device)
            began = time.monotonic()
            deadline = began + _SETUP_S
            with self._lock:
                _check(_init(self._handle, 2, unique_id, self._rank, blocking=False))
                self._finish(deadline)
            initialized = time.monotonic()
            # NCCL connects the GPUs only at the first message.
            first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8, device=self._device)
            torch.cuda.current_stream().synchronize()
            transfer = self.receive(first, None) if self._rank else self.send(first)
            while not transfer.query():
                with self._lock:
                    self._has_queued()
                self._wait(deadline)
            self._under_way.clear()
            self.up = not self._closed.is_set()
            seconds = {"init_s": initialized - began, "first_message_s": time.monotonic() - initialized}
            log.info("connected to the other GPU: %s", seconds, extra={"event": "gpus_connected", **seconds})
            self._watch()
        except Exception as error:  # record any error: others wait until the pair is up or has failed
            self.failure = str(error)

    def _watch(self) -> None:
        """Abort the communicator when a transfer does not end. The engine itself may not notice, because it may be
        waiting for the device, and the device for the transfer."""
        while not self._closed.wait(_WATCH_S):
            while self._under_way and self._under_way[0][1].query():
                self._under_way.popleft()
            if self._under_way and time.monotonic() > self._under_way[0][0] + _WATCH_S:
                self.failure = "a transfer does not end"
                self.close()

    def _transfer(self, call: Any, values: torch.Tensor, behind: Callable[[], None] | None) -> Transfer:
        with self._lock:
            if self._closed.is_set():
                raise NcclError("closed")
            self._finish(time.monotonic() + _CALL_S)
            size = values.numel() * values.element_size()
            _check(call(values.data_ptr(), size, _BYTES, 1 - self._rank, self._handle, self.stream.cuda_stream))
            transfer = self._unqueued = Transfer(behind)
            self._under_way.append((time.monotonic() + TRANSFER_S, transfer))
            return transfer

    def _finish(self, deadline: float) -> None:
        """Wait until NCCL has queued the operations that it has accepted."""
        spin_until = time.monotonic() + _SPIN_S
        while not self._has_queued():
            if time.monotonic() > spin_until:
                self._wait(deadline)

    def _has_queued(self) -> bool:
        """Return whether NCCL has finished all calls, which it works on in the background. Raises NcclError."""
        state = ctypes.c_int()
        _check(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        _check(state.value)
        if state.value == _IN_PROGRESS:
            return False
        if self._unqueued is not None:
            self._unqueued.queued(self.stream)
            self._unqueued = None
        return True

    def _wait(self, deadline: float) -> None:
        if self._closed.wait(_POLL_S):
            raise NcclError("closed")
        if time.monotonic() > deadline:
            raise NcclError("the peer does not answer")

    def _abort(self) -> None:
        with self._lock:
            if self._handle:
                _library().ncclCommAbort(self._handle)
                self._handle = ctypes.c_void_p()
        self.stream.synchronize()
        self.gone = True


def _text(code: int) -> str:
    text: bytes = _library().ncclGetErrorString(code)
    return text.decode()


def _check(code: int) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        raise NcclError(_text(code))
