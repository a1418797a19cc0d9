// One backend's side of allreduce.h. Every backend (CUDA, emulated) fills one of these; api.cpp chooses between them.
#pragma once

#include "include/allreduce.h"

// X(name, parameters): the entry points that differ by backend. Those of a communicator take it first.
// clang-format off
#define AR_BACKEND_CALLS(X)                                                                                  \
  X(comm_create, (const ar_options*, ar_comm**, ar_error*))                                                  \
  X(comm_has_path, (const ar_comm*, int32_t, char*, size_t))                                                 \
  X(allreduce, (ar_comm*, const ar_buffer*, int32_t, int32_t, int32_t, ar_error*))                           \
  X(comm_prepare, (ar_comm*, int64_t, int32_t, ar_error*))                                                   \
  X(comm_wait, (ar_comm*, int64_t, ar_error*))                                                               \
  X(comm_error, (ar_comm*, ar_error*))                                                                       \
  X(comm_stats, (ar_comm*, ar_stats*))                                                                       \
  X(comm_close, (ar_comm*, ar_error*))                                                                       \
  X(comm_lose, (ar_comm*, int32_t, const char*, ar_error*))                                                  \
  X(comm_export_peer, (ar_comm*, int32_t, uint8_t*, ar_error*))                                              \
  X(comm_import_peers, (ar_comm*, const uint8_t*, ar_error*))                                                \
  X(comm_check_peers, (ar_comm*, int32_t, ar_error*))                                                        \
  X(comm_nccl_windows, (ar_comm*, int64_t, ar_ptr*, ar_error*))                                              \
  X(comm_free, (ar_comm*))                                                                                   \
  X(nccl_id, (const char*, int32_t, uint8_t*, ar_error*))                                                    \
  X(device_count, (int32_t*, ar_error*))                                                                     \
  X(device_get_info, (int32_t, ar_device_info*, ar_error*))                                                  \
  X(device_can_access_peer, (int32_t, int32_t, int32_t*, ar_error*))                                         \
  X(device_malloc, (int32_t, int64_t, ar_ptr*, ar_error*))                                                   \
  X(device_free, (int32_t, ar_ptr, ar_error*))                                                               \
  X(host_malloc, (int64_t, ar_ptr*, ar_error*))                                                              \
  X(host_free, (ar_ptr, ar_error*))                                                                          \
  X(copy_to_device, (int32_t, ar_ptr, const void*, int64_t, ar_error*))                                      \
  X(copy_to_host, (int32_t, void*, ar_ptr, int64_t, ar_error*))                                              \
  X(copy_async, (int32_t, ar_ptr, ar_ptr, int64_t, ar_stream, ar_error*))                                    \
  X(fill_async, (int32_t, ar_ptr, int32_t, int64_t, ar_stream, ar_error*))                                   \
  X(stream_create, (int32_t, ar_stream*, ar_error*))                                                         \
  X(stream_destroy, (int32_t, ar_stream, ar_error*))                                                         \
  X(stream_synchronize, (int32_t, ar_stream, ar_error*))                                                     \
  X(stream_query, (int32_t, ar_stream, ar_error*))                                                           \
  X(device_synchronize, (int32_t, ar_error*))                                                                \
  X(event_create, (int32_t, ar_event*, ar_error*))                                                           \
  X(event_destroy, (int32_t, ar_event, ar_error*))                                                           \
  X(event_record, (int32_t, ar_event, ar_stream, ar_error*))                                                 \
  X(event_wait, (int32_t, ar_event, ar_stream, ar_error*))                                                   \
  X(event_synchronize, (int32_t, ar_event, ar_error*))                                                       \
  X(event_elapsed_us, (int32_t, ar_event, ar_event, double*, ar_error*))                                     \
  X(trace_start, (const int32_t*, int32_t, ar_error*))                                                       \
  X(trace_stop, (ar_error*))                                                                                 \
  X(trace_read, (ar_trace_record*, int64_t, int64_t*, ar_error*))                                            \
  X(capture_begin, (int32_t, ar_stream, ar_error*))                                                          \
  X(capture_end, (int32_t, ar_stream, ar_graph*, ar_error*))                                                 \
  X(graph_launch, (int32_t, ar_graph, ar_stream, ar_error*))                                                 \
  X(graph_destroy, (int32_t, ar_graph, ar_error*))                                                           \
  X(copy_kind_async, (int32_t, ar_ptr, ar_ptr, int64_t, int32_t, ar_stream, ar_error*))                      \
  X(bench_load, (int32_t, int32_t, int64_t, ar_stream, ar_error*))                                           \
  X(bench_compare, (int32_t, const ar_bench_rows*, ar_ptr, ar_stream, ar_error*))                            \
  X(probe_pair, (int32_t, int32_t, int32_t, ar_probe_result*, ar_error*))
// clang-format on

namespace ar {

struct Backend {
  int32_t id;  // ar_backend
  int32_t runtime_version;
  int64_t (*shared_bytes)(const ar_options*);
#define AR_FIELD(name, parameters) int32_t(*name) parameters;
  AR_BACKEND_CALLS(AR_FIELD)
#undef AR_FIELD
};

}  // namespace ar

// The handle: every backend's communicator starts with this.
struct ar_comm {
  const ar::Backend* backend;
};

namespace ar_cuda {
const ar::Backend* backend();
}
namespace ar_emulated {
const ar::Backend* backend();
}
