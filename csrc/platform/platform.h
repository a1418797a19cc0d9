// The platform: everything kernels/, transports/ and comm need of a GPU runtime, under the same names for every vendor.
// The including file defines AR_PLATFORM_CUDA or AR_PLATFORM_EMULATED; everything below lives in namespace AR_NS, so that
// one archive holds several platforms. Nothing outside platform/ and emulated/ names a vendor.
//
// Host side (all return a Code, 0 = good, unless noted; none changes the current device but set_device):
//
//   Stream Event Graph GraphExec   handles; a null Stream is the legacy default stream
//   Code, kOk                      the runtime's own codes; code_text(c), code_is_lost(c), code_is_memory(c),
//                                  code_is_argument(c): a bad pointer or handle;
//                                  code_is_deadlock(c), code_is_hazard(c): the emulator's reports
//   emulated_nccl_host()           what an emulated libnccl is bound to (emulated/nccl.h), null elsewhere
//   drive_is_stepped()             true where work advances only inside calls that wait (the emulator's stepped drive)
//   device_count set_device get_device device_info can_access_peer runtime_version
//   enable_peer(device, peer)      lets device load from and store to peer's memory; good if it already may
//   malloc_device free_device      on the current device
//   malloc_exported(p, bytes)      as malloc_device, for memory that other processes may open; free_device frees it
//   ipc_export(p, handle)          kIpcBytes that open it elsewhere; p is what malloc_exported gave
//   ipc_open(p, handle) ipc_close  another process's memory, for the current device; closed before its owner frees it
//   malloc_pinned free_pinned      portable, mapped; host_to_device(host) gives the pointer a kernel uses
//   register_pinned(host, bytes) unregister_pinned   memory the program has mapped, as malloc_pinned's from then on
//   stream_identity(Stream)        a number that no other stream of the process ever has; 0: unknown. Not on a
//                                  stream in capture
//   stream_create(Stream*) stream_destroy stream_query stream_synchronize device_synchronize
//   event_create(Event*, timing) event_destroy event_record(Event, Stream) event_query event_synchronize event_elapsed_us
//   stream_wait(Stream, Event)     binds to the record current at the call, as CUDA does
//   copy_async(dst, src, bytes, CopyKind, Stream)   copy_to_host / copy_to_device (blocking)   fill_async
//   trace_start(devices) trace_stop() trace_read(records*)   what copy_async, fill_async and launch enqueue there and when it
//                                  ran (allreduce.h, "trace")
//   host_call(Stream, fn, arg)     a host function on the stream; it may call nothing of the platform
//   capture_info(Stream, CaptureInfo*)  capture_begin(Stream)  capture_end(Stream, Graph*)
//   graph_retain(CaptureInfo, void* arg, void (*drop)(void*))  drop runs when graph and its executables are gone, maybe on
//                                  another thread, and may call nothing of the platform
//   graph_instantiate graph_launch graph_destroy graph_exec_destroy
//   RelaxedCapture                 guard: allocation is allowed beside any capture while it lives
//   check_range(ptr, bytes, device)    emulated: every byte must lie in one live allocation that `device` can reach;
//                                  CUDA: always good (a query costs more than a small reduction)
//   launch(kernel, blocks, threads, Stream)    launch_early: may overlap the end of the kernel before it (b.begin)
//   load_kernel<K>()    resident_blocks<K>(threads, int* blocks on the device)
//
// Device side. A kernel is a struct: its members are the parameters (trivially copyable), `static constexpr const char*
// kName`, and `AR_DEVICE void operator()(Block& b) const`, written as block-wide phases. On CUDA a phase's loop is strided
// over the block's threads; emulated, a block is one fiber that runs the loop in order and yields inside spin().
//
//   b.index() b.count()            this block, blocks of the launch
//   b.each(n, f)                   f(i) for i in [0, n), shared out over the block's threads
//   b.groups<U>(n, f)              f(i, each) once per group of up to U indices of one thread: each(g) runs g(u, offset) for
//                                  u = 0, 1, ... and stands for index i + offset; unrolled on CUDA, so that U loads of one
//                                  each() are in flight together
//   b.sync()                       block barrier       b.any(p) block barrier, true if p holds in any thread
//   b.lead(f)                      one thread runs f
//   b.work(n, us, f)               every thread runs f(i) for i in [0, n): arithmetic alone, about us each time. Emulated,
//                                  nothing runs and n * us pass.
//   b.begin()                      first in a kernel of launch_early
//   b.reads(p, bytes) b.writes(p, bytes)   declares what the phase that follows touches (cost and hazards); free on CUDA
//   b.reads_flagged(p, bytes)      declares words just read that each carried their flag (LL): spin() found every one
//   load_sys(b, const Vec16*)      16 bytes that another processor may be writing: never cached, never torn below 8 bytes
//   store_sys(b, Vec16*, Vec16)    to memory that another processor reads. Blocks do not share 64-byte lines of it
//   load_flag(b, const uint32_t*)  store_flag(b, Order, uint32_t*, value)
//   fence_sys(b, Order)            all earlier stores of this thread are visible system-wide before any later one
//   spin(b, Order, SpinLimit, addr, pred)  until pred() holds: Spin::ready; Spin::aborted: the abort word is set;
//                                  Spin::expired: limit.timeout_ns passed since this call. addr: what pred looks at.
//   slot_turn(Order, uint32_t)     its argument (emulated: 0 if that primitive is taken out)
//   to_f32 / from_f32 for F16      float_to_half_bits, half_bits_to_float
//   add_rn, div_rn                 IEEE single precision, never contracted, no flush to zero
//
// AR_NOINLINE marks rare device code kept out of line (compile time, registers). AR_UNROLL before a loop asks for it unrolled,
// AR_NO_UNROLL for the opposite. AR_DEVICE marks device functions, AR_HOST_DEVICE both. ordered(Order) is true unless that primitive is taken out
// (constant on CUDA); host-side waits go through order_wait(Order, Stream, Event).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../order.h"

namespace ar {

struct Vec16 {
  uint32_t w[4];
};

enum class CopyKind { host_to_device, device_to_host, device_to_device };
enum class Spin { ready = 0, aborted = 1, expired = 2 };

constexpr int kIpcBytes = 64;

struct SpinLimit {
  const uint32_t* abort;  // device-visible, in pinned host memory
  uint64_t timeout_ns;
};

struct DeviceInfo {
  char name[128];
  char uuid[48];
  char bus_id[32];
  int cc_major, cc_minor;
  int sms;
  int copy_engines;
  int64_t memory_bytes;
};

enum class Capturing { none, active, invalidated };

}  // namespace ar

#if defined(AR_PLATFORM_CUDA)
#define AR_UNROLL _Pragma("unroll")
#define AR_NO_UNROLL _Pragma("unroll 1")
#define AR_NOINLINE __device__ __noinline__
#define AR_NS ar_cuda
#include "cuda.h"
#elif defined(AR_PLATFORM_EMULATED)
#define AR_UNROLL
#define AR_NO_UNROLL
#define AR_NOINLINE
#define AR_NS ar_emulated
#include "emulated.h"
#else
#error "define AR_PLATFORM_CUDA or AR_PLATFORM_EMULATED"
#endif
