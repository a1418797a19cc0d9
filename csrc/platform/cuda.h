// CUDA, toolkits 11.8 to 13, under the names platform.h lists. Vendor calls appear here and nowhere else.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "cuda_trace.h"

#define AR_DEVICE __device__ __forceinline__
#define AR_HOST_DEVICE __host__ __device__ __forceinline__

namespace AR_NS {

using namespace ar;

using Stream = cudaStream_t;
using Event = cudaEvent_t;
using Graph = cudaGraph_t;
using GraphExec = cudaGraphExec_t;
using Code = int;
constexpr Code kOk = 0;
constexpr bool kSimulated = false;
constexpr int kBackend = 1;  // AR_BACKEND_CUDA

struct CaptureInfo {
  Capturing state = Capturing::none;
  unsigned long long id = 0;
  Graph graph = nullptr;
};

inline const char* code_text(Code c) { return cudaGetErrorString(static_cast<cudaError_t>(c)); }
inline bool code_is_memory(Code c) {
  if (c != cudaErrorMemoryAllocation) return false;
  cudaGetLastError();  // not sticky: forget it, so that the host program does not find it later
  return true;
}
inline bool code_is_argument(Code c) { return c == cudaErrorInvalidValue || c == cudaErrorInvalidResourceHandle; }
inline bool code_is_lost(Code c) {
  switch (c) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown:
    case cudaErrorContained:
      return true;
    default:
      return false;
  }
}

// The emulator's reports.
constexpr bool code_is_deadlock(Code) { return false; }
constexpr bool code_is_hazard(Code) { return false; }
inline const void* emulated_nccl_host() { return nullptr; }
constexpr bool drive_is_stepped() { return false; }  // work goes on by itself

inline int runtime_version() { return CUDART_VERSION; }
inline Code device_count(int* n) {
  *n = 0;
  cudaError_t e = cudaGetDeviceCount(n);
  if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    *n = 0;
    return kOk;
  }
  return e;
}
inline Code set_device(int d) { return cudaSetDevice(d); }
inline Code get_device(int* d) { return cudaGetDevice(d); }
inline Code device_info(int d, DeviceInfo* out) {
  cudaDeviceProp p;
  cudaError_t e = cudaGetDeviceProperties(&p, d);
  if (e != cudaSuccess) return e;
  std::memset(out, 0, sizeof(*out));
  std::snprintf(out->name, sizeof(out->name), "%.127s", p.name);
  const auto* u = reinterpret_cast<const unsigned char*>(p.uuid.bytes);
  std::snprintf(out->uuid, sizeof(out->uuid),
                "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
                u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  std::snprintf(out->bus_id, sizeof(out->bus_id), "%04x:%02x:%02x.0", static_cast<unsigned>(p.pciDomainID),
                static_cast<unsigned>(p.pciBusID), static_cast<unsigned>(p.pciDeviceID));
  out->cc_major = p.major;
  out->cc_minor = p.minor;
  out->sms = p.multiProcessorCount;
  out->copy_engines = p.asyncEngineCount;
  out->memory_bytes = static_cast<int64_t>(p.totalGlobalMem);
  return kOk;
}
inline Code can_access_peer(int* can, int device, int peer) { return cudaDeviceCanAccessPeer(can, device, peer); }

inline Code enable_peer(int device, int peer) {
  int old = 0;
  cudaError_t e = cudaGetDevice(&old);
  if (e == cudaSuccess) e = cudaSetDevice(device);
  if (e != cudaSuccess) return e;
  e = cudaDeviceEnablePeerAccess(peer, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) e = cudaSuccess;
  cudaGetLastError();  // not sticky: forget it
  const cudaError_t back = cudaSetDevice(old);
  return e != cudaSuccess ? e : back;
}

inline Code malloc_device(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
inline Code free_device(void* p) { return cudaFree(p); }
// Whole 2 MiB: a handle opens whatever shares its pages, too.
inline Code malloc_exported(void** p, size_t bytes) {
  constexpr size_t kPage = 2 << 20;
  return cudaMalloc(p, (bytes + kPage - 1) / kPage * kPage);
}
inline Code ipc_export(void* p, uint8_t* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == ar::kIpcBytes, "handles travel as they are");
  cudaIpcMemHandle_t h;
  const cudaError_t e = cudaIpcGetMemHandle(&h, p);
  if (e == cudaSuccess) std::memcpy(handle, &h, sizeof(h));
  cudaGetLastError();  // not sticky: forget it
  return e;
}
inline Code ipc_open(void** p, const uint8_t* handle) {
  cudaIpcMemHandle_t h;
  std::memcpy(&h, handle, sizeof(h));
  const cudaError_t e = cudaIpcOpenMemHandle(p, h, cudaIpcMemLazyEnablePeerAccess);
  cudaGetLastError();
  return e;
}
inline Code ipc_close(void* p) { return cudaIpcCloseMemHandle(p); }

inline Code malloc_pinned(void** p, size_t bytes) {
  return cudaHostAlloc(p, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
}
inline Code free_pinned(void* p) { return cudaFreeHost(p); }
inline Code register_pinned(void* p, size_t bytes) {
  return cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
}
inline Code unregister_pinned(void* p) { return cudaHostUnregister(p); }
inline Code host_to_device(void** dev, void* host) { return cudaHostGetDevicePointer(dev, host, 0); }

inline Code stream_create(Stream* s) { return cudaStreamCreateWithFlags(s, cudaStreamNonBlocking); }
inline Code stream_destroy(Stream s) { return cudaStreamDestroy(s); }
inline Code stream_query(Stream s, bool* done) {
  cudaError_t e = cudaStreamQuery(s);
  *done = e == cudaSuccess;
  return e == cudaErrorNotReady ? kOk : e;
}
inline Code stream_synchronize(Stream s) { return cudaStreamSynchronize(s); }
inline uint64_t stream_identity(Stream s) {
#if CUDART_VERSION >= 12000
  unsigned long long id = 0;
  if (s != nullptr && cudaStreamGetId(s, &id) == cudaSuccess) return id + 1;  // ids may begin at 0
#else
  (void)s;
#endif
  return 0;
}
inline Code device_synchronize() { return cudaDeviceSynchronize(); }

inline Code event_create(Event* e, bool timing) {
  return cudaEventCreateWithFlags(e, timing ? cudaEventDefault : cudaEventDisableTiming);
}
inline Code event_destroy(Event e) { return cudaEventDestroy(e); }
inline Code event_record(Event e, Stream s) { return cudaEventRecord(e, s); }
inline Code event_query(Event e, bool* done) {
  cudaError_t r = cudaEventQuery(e);
  *done = r == cudaSuccess;
  return r == cudaErrorNotReady ? kOk : r;
}
inline Code event_synchronize(Event e) { return cudaEventSynchronize(e); }
inline Code event_elapsed_us(double* us, Event a, Event b) {
  float ms = 0;
  cudaError_t e = cudaEventElapsedTime(&ms, a, b);
  *us = static_cast<double>(ms) * 1e3;
  return e;
}
inline Code stream_wait(Stream s, Event e) { return cudaStreamWaitEvent(s, e, 0); }

inline cudaMemcpyKind kind_of(CopyKind k) {
  return k == CopyKind::host_to_device   ? cudaMemcpyHostToDevice
         : k == CopyKind::device_to_host ? cudaMemcpyDeviceToHost
                                         : cudaMemcpyDeviceToDevice;
}
inline Code copy_async(void* dst, const void* src, size_t n, CopyKind k, Stream s) {
  const int32_t kind = k == CopyKind::host_to_device   ? AR_TRACE_HOST_TO_DEVICE
                       : k == CopyKind::device_to_host ? AR_TRACE_DEVICE_TO_HOST
                                                       : AR_TRACE_DEVICE_TO_DEVICE;
  return traced(kind, "copy", n, s, [&] { return cudaMemcpyAsync(dst, src, n, kind_of(k), s); });
}
// From pageable memory cudaMemcpy may return before the bytes are on the device, and streams that do not synchronise with
// the legacy one would not wait for them.
inline Code copy_blocking(void* dst, const void* src, size_t n, CopyKind k) {
  cudaError_t e = cudaMemcpy(dst, src, n, kind_of(k));
  return e == cudaSuccess && k == CopyKind::host_to_device ? cudaStreamSynchronize(cudaStreamLegacy) : e;
}
inline Code fill_async(void* dst, int byte, size_t n, Stream s) {
  return traced(AR_TRACE_OTHER, "fill", n, s, [&] { return cudaMemsetAsync(dst, byte, n, s); });
}
inline Code host_call(Stream s, void (*fn)(void*), void* arg) { return cudaLaunchHostFunc(s, fn, arg); }

inline Code capture_info(Stream s, CaptureInfo* out) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  cudaError_t e = cudaStreamGetCaptureInfo(s, &status, &id, &graph, nullptr, nullptr, nullptr);
#else
  cudaError_t e = cudaStreamGetCaptureInfo_v2(s, &status, &id, &graph, nullptr, nullptr);
#endif
  if (e != cudaSuccess) return e;
  out->state = status == cudaStreamCaptureStatusNone     ? Capturing::none
               : status == cudaStreamCaptureStatusActive ? Capturing::active
                                                         : Capturing::invalidated;
  out->id = id;
  out->graph = graph;
  return kOk;
}
inline Code capture_begin(Stream s) { return cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed); }
inline Code capture_end(Stream s, Graph* g) { return cudaStreamEndCapture(s, g); }
inline Code graph_retain(const CaptureInfo& info, void* arg, void (*drop)(void*)) {
  cudaUserObject_t object;
  cudaError_t e = cudaUserObjectCreate(&object, arg, drop, 1, cudaUserObjectNoDestructorSync);
  if (e != cudaSuccess) return e;
  e = cudaGraphRetainUserObject(info.graph, object, 1, cudaGraphUserObjectMove);
  if (e != cudaSuccess) cudaUserObjectRelease(object, 1);
  return e;
}
inline Code graph_instantiate(GraphExec* x, Graph g) { return cudaGraphInstantiateWithFlags(x, g, 0); }
inline Code graph_launch(GraphExec x, Stream s) { return cudaGraphLaunch(x, s); }
inline Code graph_destroy(Graph g) { return cudaGraphDestroy(g); }
inline Code graph_exec_destroy(GraphExec x) { return cudaGraphExecDestroy(x); }

class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline bool check_range(const void*, size_t, int) { return true; }

constexpr bool ordered(Order) { return true; }
inline Code order_wait(Order, Stream s, Event e) { return stream_wait(s, e); }

// ---- device side ----------------------------------------------------------------------------------------------

class Block {
 public:
  AR_DEVICE int index() const { return static_cast<int>(blockIdx.x); }
  AR_DEVICE int count() const { return static_cast<int>(gridDim.x); }
  template <class F>
  AR_DEVICE void each(int64_t n, F f) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <int U, class F>
  AR_DEVICE void groups(int64_t n, F f) {
    // 32 bits save registers: a block never has 2^31 packs.
    const int count = static_cast<int>(n), step = static_cast<int>(blockDim.x);
    int i = static_cast<int>(threadIdx.x);
    for (; i + (U - 1) * step < count; i += U * step)
      f(i, [step](auto g) {
        AR_UNROLL
        for (int u = 0; u < U; u++) g(u, u * step);
      });
    for (; i < count; i += step) f(i, [](auto g) { g(0, 0); });
  }
  AR_DEVICE void sync() { __syncthreads(); }
  AR_DEVICE bool any(bool p) { return __syncthreads_or(p) != 0; }
  template <class F>
  AR_DEVICE void lead(F f) {
    if (threadIdx.x == 0) f();
  }
  template <class F>
  AR_DEVICE void work(int64_t n, double, F f) {
    for (int64_t i = 0; i < n; i++) f(i);
  }
  AR_DEVICE void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
  AR_DEVICE void reads(const void*, int64_t) {}
  AR_DEVICE void reads_flagged(const void*, int64_t) {}
  AR_DEVICE void writes(const void*, int64_t) {}
};

AR_DEVICE uint64_t device_clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

AR_DEVICE Vec16 load_sys(Block&, const Vec16* p) {
  Vec16 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
AR_DEVICE void store_sys(Block&, Vec16* p, const Vec16& v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
               : "memory");
}
AR_DEVICE uint32_t load_flag(Block&, const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
AR_DEVICE void store_flag(Block&, Order, uint32_t* p, uint32_t v) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
AR_DEVICE void fence_sys(Block&, Order) { __threadfence_system(); }
AR_DEVICE uint32_t slot_turn(Order, uint32_t turn) { return turn; }

// The abort word and the clock are looked at every 256 polls: a poll of host memory takes about 1 us, so an abort is
// seen within a millisecond and the common case pays nothing.
template <class P>
AR_DEVICE Spin spin(Block& b, Order, const SpinLimit& limit, const void*, P pred) {
  for (int i = 0; i < 256; i++)
    if (pred()) return Spin::ready;
  const uint64_t start = device_clock_ns();
  for (;;) {
    for (int i = 0; i < 256; i++)
      if (pred()) return Spin::ready;
    if (load_flag(b, limit.abort) != 0) return Spin::aborted;
    if (device_clock_ns() - start > limit.timeout_ns) return Spin::expired;
  }
}

AR_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
AR_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
AR_DEVICE uint16_t float_to_half_bits(float f) { return __half_as_ushort(__float2half_rn(f)); }
AR_DEVICE float half_bits_to_float(uint16_t h) { return __half2float(__ushort_as_half(h)); }
AR_DEVICE uint32_t float_bits(float f) { return __float_as_uint(f); }
AR_DEVICE float bits_float(uint32_t u) { return __uint_as_float(u); }

template <class K>
__global__ void __launch_bounds__(K::kMaxThreads, 1) kernel_entry(const __grid_constant__ K kernel) {
  Block b;
  kernel(b);
}

template <class K>
Code launch(const K& kernel, int blocks, int threads, Stream s) {
  void* args[] = {const_cast<K*>(&kernel)};
  return traced(AR_TRACE_KERNEL, K::kName, 0, s, [&] {
    return cudaLaunchKernel(reinterpret_cast<const void*>(&kernel_entry<K>), dim3(static_cast<unsigned>(blocks)),
                            dim3(static_cast<unsigned>(threads)), args, 0, s);
  });
}
// As launch, but the kernel's launch may overlap the end of what is before it on the stream: it calls b.begin() first, which
// waits for that work and its memory. Saves part of the launch latency between kernels of one stream.
template <class K>
Code launch_early(const K& kernel, int blocks, int threads, Stream s) {
#if CUDART_VERSION >= 12030
  void* args[] = {const_cast<K*>(&kernel)};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = s;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return traced(AR_TRACE_KERNEL, K::kName, 0, s,
                [&] { return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(&kernel_entry<K>), args); });
#else
  return launch(kernel, blocks, threads, s);
#endif
}
// Asking for a kernel's attributes loads its module on the current device: a first launch while another kernel spins
// would wait for that kernel (seen to deadlock on two H200).
template <class K>
Code load_kernel() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, reinterpret_cast<const void*>(&kernel_entry<K>));
}
template <class K>
Code resident_blocks(int threads, int* blocks) {
  int device = 0, sms = 0, per_sm = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(&kernel_entry<K>), threads,
                                                      0);
  *blocks = sms * per_sm;
  return e;
}

}  // namespace AR_NS
