// allreduce.h: chooses the backend and forwards. AR_WITH_CUDA says whether this archive holds the CUDA one.
#include "backend.h"
#include "status.h"

#ifndef AR_WITH_CUDA
#define AR_WITH_CUDA 0
#endif
#ifndef AR_SOURCE_HASH
#define AR_SOURCE_HASH 0
#endif

namespace {

const ar::Backend* find(int32_t id, ar_error* error) {
  ar::clear(error);
  if (id == AR_BACKEND_EMULATED) return ar_emulated::backend();
#if AR_WITH_CUDA
  if (id == AR_BACKEND_CUDA) return ar_cuda::backend();
#else
  if (id == AR_BACKEND_CUDA) {
    ar::fail(error, AR_ERR_BACKEND, {},
             "this build holds the emulated backend only: build with -tags cuda (make does, where it finds or fetches "
             "nvcc)");
    return nullptr;
  }
#endif
  ar::fail(error, AR_ERR_ARGUMENT, {}, "backend %d: allowed are %d (cuda) and %d (emulated)", id, AR_BACKEND_CUDA,
           AR_BACKEND_EMULATED);
  return nullptr;
}

int32_t no_backend(int32_t id) { return id == AR_BACKEND_CUDA ? AR_ERR_BACKEND : AR_ERR_ARGUMENT; }

}  // namespace

extern "C" {

int32_t ar_abi_version(void) { return AR_ABI_VERSION; }
const char* ar_version(void) { return AR_VERSION_STRING; }
uint64_t ar_source_hash(void) { return static_cast<uint64_t>(AR_SOURCE_HASH); }
int32_t ar_backends(void) { return (AR_WITH_CUDA ? 1 << AR_BACKEND_CUDA : 0) | 1 << AR_BACKEND_EMULATED; }
int32_t ar_runtime_version(int32_t id) {
  const ar::Backend* b = find(id, nullptr);
  return b == nullptr ? 0 : b->runtime_version;
}

const char* ar_status_name(int32_t s) {
  static const char* const names[] = {"ok",         "bad argument",  "no device",       "backend not built in",
                                      "allocation", "runtime error", "timeout",         "mismatch",
                                      "closed",     "capture mixed", "not capturable",  "unsupported",
                                      "nccl error", "device lost",   "emulator report", "pending",
                                      "hazard",     "peer lost"};
  return s >= 0 && s <= AR_ERR_PEER_LOST ? names[s] : "unknown status";
}
const char* ar_path_name(int32_t p) { return ar::path_name(p); }
const char* ar_type_name(int32_t t) { return ar::type_name(t); }
int32_t ar_type_size(int32_t t) { return ar::type_size(t); }

int32_t ar_comm_create(const ar_options* o, ar_comm** comm, ar_error* e) {
  ar::clear(e);
  if (comm != nullptr) *comm = nullptr;
  if (o == nullptr || comm == nullptr) return ar::fail(e, AR_ERR_ARGUMENT, {}, "options and comm must not be NULL");
  if (o->size != sizeof(ar_options))
    return ar::fail(e, AR_ERR_ARGUMENT, {}, "options.size is %u, this library's is %zu: header and library differ",
                    o->size, sizeof(ar_options));
  const ar::Backend* b = find(o->backend, e);
  return b == nullptr ? no_backend(o->backend) : b->comm_create(o, comm, e);
}

#define AR_ON_COMM(name, parameters, ...)                                                     \
  int32_t ar_##name parameters {                                                              \
    if (comm == nullptr) return ar::fail(e, AR_ERR_ARGUMENT, {}, "the communicator is NULL"); \
    return comm->backend->name(__VA_ARGS__);                                                  \
  }
AR_ON_COMM(allreduce, (ar_comm * comm, const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire, ar_error* e), comm,
           bufs, n, path, wire, e)
AR_ON_COMM(comm_prepare, (ar_comm * comm, int64_t max_bytes, int32_t path, ar_error* e), comm, max_bytes, path, e)
AR_ON_COMM(comm_wait, (ar_comm * comm, int64_t timeout_us, ar_error* e), comm, timeout_us, e)
AR_ON_COMM(comm_error, (ar_comm * comm, ar_error* e), comm, e)
AR_ON_COMM(comm_close, (ar_comm * comm, ar_error* e), comm, e)
AR_ON_COMM(comm_export_peer, (ar_comm * comm, int32_t rank, uint8_t* handle, ar_error* e), comm, rank, handle, e)
AR_ON_COMM(comm_import_peers, (ar_comm * comm, const uint8_t* handles, ar_error* e), comm, handles, e)
AR_ON_COMM(comm_nccl_windows, (ar_comm * comm, int64_t bytes, ar_ptr* ptrs, ar_error* e), comm, bytes, ptrs, e)
AR_ON_COMM(comm_check_peers, (ar_comm * comm, int32_t look, ar_error* e), comm, look, e)
AR_ON_COMM(comm_lose, (ar_comm * comm, int32_t rank, const char* text, ar_error* e), comm, rank, text, e)
#undef AR_ON_COMM

int64_t ar_shared_bytes(const ar_options* o) { return o == nullptr ? 0 : ar_emulated::backend()->shared_bytes(o); }
int32_t ar_comm_has_path(const ar_comm* comm, int32_t path, char* reason, size_t n) {
  if (comm == nullptr) return 0;
  return comm->backend->comm_has_path(comm, path, reason, n);
}
int32_t ar_comm_stats(ar_comm* comm, ar_stats* stats) {
  if (comm == nullptr || stats == nullptr) return AR_ERR_ARGUMENT;
  return comm->backend->comm_stats(comm, stats);
}
void ar_comm_free(ar_comm* comm) {
  if (comm != nullptr) comm->backend->comm_free(comm);
}

#define AR_ON_BACKEND(name, parameters, ...)                          \
  int32_t ar_##name parameters {                                      \
    const ar::Backend* b = find(backend, e);                          \
    return b == nullptr ? no_backend(backend) : b->name(__VA_ARGS__); \
  }
AR_ON_BACKEND(nccl_id, (int32_t backend, const char* lib, int32_t p2p_disable, uint8_t* id, ar_error* e), lib,
              p2p_disable, id, e)
AR_ON_BACKEND(device_count, (int32_t backend, int32_t* n, ar_error* e), n, e)
AR_ON_BACKEND(device_get_info, (int32_t backend, int32_t d, ar_device_info* info, ar_error* e), d, info, e)
AR_ON_BACKEND(device_can_access_peer, (int32_t backend, int32_t d, int32_t p, int32_t* can, ar_error* e), d, p, can, e)
AR_ON_BACKEND(device_malloc, (int32_t backend, int32_t d, int64_t n, ar_ptr* p, ar_error* e), d, n, p, e)
AR_ON_BACKEND(device_free, (int32_t backend, int32_t d, ar_ptr p, ar_error* e), d, p, e)
AR_ON_BACKEND(host_malloc, (int32_t backend, int64_t n, ar_ptr* p, ar_error* e), n, p, e)
AR_ON_BACKEND(host_free, (int32_t backend, ar_ptr p, ar_error* e), p, e)
AR_ON_BACKEND(copy_to_device, (int32_t backend, int32_t d, ar_ptr to, const void* from, int64_t n, ar_error* e), d, to,
              from, n, e)
AR_ON_BACKEND(copy_to_host, (int32_t backend, int32_t d, void* to, ar_ptr from, int64_t n, ar_error* e), d, to, from, n,
              e)
AR_ON_BACKEND(copy_async, (int32_t backend, int32_t d, ar_ptr to, ar_ptr from, int64_t n, ar_stream s, ar_error* e), d,
              to, from, n, s, e)
AR_ON_BACKEND(fill_async, (int32_t backend, int32_t d, ar_ptr to, int32_t v, int64_t n, ar_stream s, ar_error* e), d,
              to, v, n, s, e)
AR_ON_BACKEND(stream_create, (int32_t backend, int32_t d, ar_stream* s, ar_error* e), d, s, e)
AR_ON_BACKEND(stream_destroy, (int32_t backend, int32_t d, ar_stream s, ar_error* e), d, s, e)
AR_ON_BACKEND(stream_synchronize, (int32_t backend, int32_t d, ar_stream s, ar_error* e), d, s, e)
AR_ON_BACKEND(stream_query, (int32_t backend, int32_t d, ar_stream s, ar_error* e), d, s, e)
AR_ON_BACKEND(device_synchronize, (int32_t backend, int32_t d, ar_error* e), d, e)
AR_ON_BACKEND(event_create, (int32_t backend, int32_t d, ar_event* ev, ar_error* e), d, ev, e)
AR_ON_BACKEND(event_destroy, (int32_t backend, int32_t d, ar_event ev, ar_error* e), d, ev, e)
AR_ON_BACKEND(event_record, (int32_t backend, int32_t d, ar_event ev, ar_stream s, ar_error* e), d, ev, s, e)
AR_ON_BACKEND(event_wait, (int32_t backend, int32_t d, ar_event ev, ar_stream s, ar_error* e), d, ev, s, e)
AR_ON_BACKEND(event_synchronize, (int32_t backend, int32_t d, ar_event ev, ar_error* e), d, ev, e)
AR_ON_BACKEND(event_elapsed_us, (int32_t backend, int32_t d, ar_event a, ar_event z, double* us, ar_error* e), d, a, z,
              us, e)
AR_ON_BACKEND(trace_start, (int32_t backend, const int32_t* devices, int32_t n, ar_error* e), devices, n, e)
AR_ON_BACKEND(trace_stop, (int32_t backend, ar_error* e), e)
AR_ON_BACKEND(trace_read, (int32_t backend, ar_trace_record* out, int64_t n, int64_t* have, ar_error* e), out, n, have,
              e)
AR_ON_BACKEND(capture_begin, (int32_t backend, int32_t d, ar_stream s, ar_error* e), d, s, e)
AR_ON_BACKEND(capture_end, (int32_t backend, int32_t d, ar_stream s, ar_graph* g, ar_error* e), d, s, g, e)
AR_ON_BACKEND(graph_launch, (int32_t backend, int32_t d, ar_graph g, ar_stream s, ar_error* e), d, g, s, e)
AR_ON_BACKEND(graph_destroy, (int32_t backend, int32_t d, ar_graph g, ar_error* e), d, g, e)
AR_ON_BACKEND(copy_kind_async,
              (int32_t backend, int32_t d, ar_ptr to, ar_ptr from, int64_t n, int32_t kind, ar_stream s, ar_error* e),
              d, to, from, n, kind, s, e)
AR_ON_BACKEND(bench_load, (int32_t backend, int32_t d, int32_t blocks, int64_t rounds, ar_stream s, ar_error* e), d,
              blocks, rounds, s, e)
AR_ON_BACKEND(bench_compare,
              (int32_t backend, int32_t d, const ar_bench_rows* rows, ar_ptr wrong, ar_stream s, ar_error* e), d, rows,
              wrong, s, e)
AR_ON_BACKEND(probe_pair,
              (int32_t backend, int32_t d, int32_t peer, int32_t timeout_ms, ar_probe_result* out, ar_error* e), d,
              peer, timeout_ms, out, e)
#undef AR_ON_BACKEND

}  // extern "C"
