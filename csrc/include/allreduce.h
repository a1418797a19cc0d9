/* allreduce.h: the mechanism of allreduce as a C API.
 *
 * Sums (or averages) a tensor over the GPUs of one machine. Every reduction names its path: which path
 * serves which call is policy and lives above this header (in Go: routing.go).
 *
 * Conventions
 *   - Every function returns an ar_status and, where it takes an ar_error*, fills it on failure (it may be
 *     NULL). Nothing throws, aborts, exits or prints.
 *   - Sizes are bytes, counts are elements, times are microseconds unless the name says otherwise.
 *   - Device pointers and streams are 64-bit integers (ar_ptr, ar_stream): of CUDA a device pointer and a
 *     cudaStream_t, of the emulated backend what ar_device_* below returned.
 *   - The calling thread's current device is left as it was found.
 *   - A communicator may be used from any thread; overlapping calls are serialised.
 *   - Nothing passed in is kept after the call, except what a comment says.
 */
#ifndef ALLREDUCE_H
#define ALLREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AR_API __attribute__((visibility("default")))
#else
#define AR_API
#endif

/* The version of this header. ar_abi_version() gives the library's; they must be equal. */
#define AR_ABI_VERSION 1
#define AR_VERSION_STRING "0.1.0"
#define AR_MAX_RANKS 8

typedef uint64_t ar_ptr;
typedef uint64_t ar_stream;

typedef enum ar_status {
  AR_OK = 0,
  AR_ERR_ARGUMENT = 1,        /* a bad argument; the message names it and what is allowed */
  AR_ERR_NO_DEVICE = 2,       /* no such device, or none at all */
  AR_ERR_BACKEND = 3,         /* this build does not hold the backend that was asked for */
  AR_ERR_ALLOC = 4,           /* memory of the library's own could not be allocated; nothing was enqueued */
  AR_ERR_RUNTIME = 5,         /* the platform's runtime failed; platform_code says how */
  AR_ERR_TIMEOUT = 6,         /* a rank waited longer than the deadline; the communicator is unusable */
  AR_ERR_MISMATCH = 7,        /* ranks disagree about a call */
  AR_ERR_CLOSED = 8,          /* the communicator was closed */
  AR_ERR_CAPTURE_MIXED = 9,   /* streams of one call are captured in ways that cannot work together */
  AR_ERR_NOT_CAPTURABLE = 10, /* this path cannot be captured that way; capture and communicator are intact */
  AR_ERR_UNSUPPORTED = 11,    /* this path does not serve this type, layout or machine */
  AR_ERR_NCCL = 12,           /* NCCL failed; platform_code is its ncclResult_t */
  AR_ERR_DEVICE_LOST = 13,    /* a device or its context is gone */
  AR_ERR_DEADLOCK = 14,       /* emulated backend only: nothing can ever run again; the message is the report */
  AR_ERR_PEER_LOST = 17,      /* the process of another rank has ended; the communicator is unusable */
  AR_ERR_HAZARD = 16,         /* emulated backend only: two accesses that nothing orders; see ar_emulated_report */
  AR_ERR_PENDING = 15         /* ar_comm_wait, ar_stream_query: not finished within the given time */
} ar_status;

typedef enum ar_backend { AR_BACKEND_CUDA = 1, AR_BACKEND_EMULATED = 2 } ar_backend;

typedef enum ar_type {
  AR_F32 = 0,
  AR_F16 = 1,
  AR_BF16 = 2,
  AR_F64 = 3,
  AR_I64 = 4,
  AR_I32 = 5,
  AR_I8 = 6,
  AR_U8 = 7
} ar_type;

typedef enum ar_op { AR_SUM = 0, AR_AVG = 1 } ar_op;

typedef enum ar_path {
  AR_PATH_NONE = 0,        /* one rank, or nothing to do: a copy at most */
  AR_PATH_INTERNAL = 1,    /* one flagged kernel per GPU through mapped pinned host memory */
  AR_PATH_COPY_ENGINE = 2, /* copy engines through pinned host memory, both directions at once */
  AR_PATH_PEER = 3,        /* direct stores over proven peer access */
  AR_PATH_NCCL = 4         /* libnccl, opened at run time */
} ar_path;
#define AR_PATHS 5
#define AR_NCCL_ID_BYTES 128
#define AR_PEER_HANDLE_BYTES 96 /* opaque: of the memory that a rank gives its peers */

/* What went wrong. rank and device are -1 where they do not apply. The last five fields are set for
 * AR_ERR_TIMEOUT and AR_ERR_MISMATCH: the phase of the protocol, the peer waited for, the epoch seen there and
 * the one awaited. */
typedef struct ar_error {
  int32_t status;
  int32_t platform_code;
  int32_t rank;
  int32_t device;
  uint64_t call;
  int32_t peer;
  uint32_t seen;
  uint32_t awaited;
  char phase[28];
  char message[512];
} ar_error;

/* One rank's part of a reduction. count elements are read at send and the total is written to recv; equal or
 * disjoint, anything else is refused. count is the number of elements in all; with rows > 1 the tensor is rows
 * rows of count/rows elements, send_pitch and recv_pitch bytes apart (0 = contiguous). count, type, op and rows
 * are equal in all buffers of a call. absent: this rank adds nothing (send is ignored and may be 0 or hold NaN),
 * recv still gets the total. stream 0 is the device's legacy default stream. */
typedef struct ar_buffer {
  ar_ptr send;
  ar_ptr recv;
  int64_t count;
  int32_t type;
  int32_t op;
  ar_stream stream;
  int32_t absent;
  int32_t rows;
  int64_t send_pitch;
  int64_t recv_pitch;
} ar_buffer;

/* ar_options: how to make a communicator. Zero the struct, set size = sizeof(ar_options), then what is needed;
 * fields at 0 take the defaults named here. devices and link_gbs are read during the call only. */
typedef struct ar_options {
  uint32_t size;
  int32_t backend;          /* ar_backend */
  int32_t world;            /* ranks in all, 1..AR_MAX_RANKS */
  const int32_t* devices;   /* device of each rank, `world` of them; NULL: rank i on device i */
  const double* link_gbs;   /* measured or maximum rate of each rank's host link, one direction, GB/s; NULL or 0:
                               unknown (25, a PCIe 4 x16 link, is assumed) */
  int64_t ring_bytes;       /* pinned ring of the copy engines per rank; 0 = 8 MiB */
  int64_t chunk_bytes;      /* wire bytes of one copy; 0 = by link and message */
  int32_t blocks;           /* blocks of the internal and peer kernels per rank; 0 = measured */
  int32_t spin_timeout_ms;  /* deadline of every wait on a device; 0 = 10000 */
  int32_t noop;             /* 1: check and route, move nothing (results are wrong on purpose) */
  const char* nccl_lib;     /* libnccl to open (a name or a path), NULL: no NCCL. Read during the call only. */
  int32_t nccl_p2p_disable; /* 1: NCCL must not use peer access: NCCL_P2P_DISABLE=1 is set before its first call */
  uint32_t first_epoch;     /* epochs start after this value; for tests of wrap-around, otherwise 0 */
  int32_t peer; /* 1: path peer may be used, since peer access between all devices was proven (ar_probe_pair)
                               or is trusted: it is enabled, and up to 32 MiB of device memory per rank allocated */

  /* One communicator over several processes of one host (locals > 0). All processes give the same options but for
   * `ranks`, and none uses the communicator before all have made it. */
  int32_t locals;       /* ranks of this process; 0: all of them, and the fields below are not looked at */
  const int32_t* ranks; /* their numbers, ascending. Read during the call only. */
  int32_t shared_fd; /* a file of ar_shared_bytes() bytes, all zero, sealed against shrinking (memfd): the same one in
                           every process. It is mapped; the descriptor is the caller's to close. -1: none, as the
                           ranks are on several hosts, where only NCCL reaches. */
  const uint8_t* nccl_id; /* AR_NCCL_ID_BYTES, the same in every process (ar_nccl_id); NULL: no NCCL. Read during the
                             call only. */
} ar_options;

typedef struct ar_comm ar_comm;

/* What one rank holds and did. Memory is in bytes, by path. */
typedef struct ar_rank_stats {
  int32_t rank;
  int32_t device;
  int64_t device_bytes[AR_PATHS];
  int64_t pinned_bytes[AR_PATHS];
} ar_rank_stats;

typedef struct ar_stats {
  uint64_t calls[AR_PATHS]; /* reductions enqueued (a captured one counts once) */
  uint64_t bytes[AR_PATHS]; /* payload bytes per rank of those */
  uint64_t allocations;     /* times the library allocated memory lazily */
  int32_t ranks;
  int32_t chunk_bytes;  /* wire bytes per copy of the last copy-engine reduction */
  int32_t nccl_version; /* NCCL's version code (23007 for 2.30.7), 0 if none was opened */
  int32_t reserved;
  ar_rank_stats rank[AR_MAX_RANKS];
} ar_stats;

/* ---- library ---------------------------------------------------------------------------------------------- */

AR_API int32_t ar_abi_version(void);
AR_API const char* ar_version(void);
/* Hash of the sources the library was built from (0 where the build gave none): tells a stale build. */
AR_API uint64_t ar_source_hash(void);
/* Bit (1 << backend) is set for each backend in this build. */
AR_API int32_t ar_backends(void);
/* Version of the platform's runtime this build was made with (CUDA: 13000 for 13.0; emulated: 0). */
AR_API int32_t ar_runtime_version(int32_t backend);
AR_API const char* ar_status_name(int32_t status);
AR_API const char* ar_path_name(int32_t path);
AR_API const char* ar_type_name(int32_t type);
/* Bytes of one element, 0 for an unknown type. */
AR_API int32_t ar_type_size(int32_t type);

/* ---- communicator ----------------------------------------------------------------------------------------- */

/* Makes a communicator of all ranks in this process. Allocates the pinned memory of the internal path (under
 * 4 MiB per rank) and loads its kernels; the copy engines' memory comes with the first large reduction. */
AR_API int32_t ar_comm_create(const ar_options* options, ar_comm** comm, ar_error* error);

/* The size of the file that the processes of a communicator share: of the options, world and ring_bytes count. */
AR_API int64_t ar_shared_bytes(const ar_options* options);

/* An id for ar_options.nccl_id, from the libnccl named: made by one process, given to all. */
AR_API int32_t ar_nccl_id(int32_t backend, const char* nccl_lib, int32_t nccl_p2p_disable, uint8_t* id,
                          ar_error* error);

/* From outside: ends the communicator on all its ranks, in all its processes, with AR_ERR_PEER_LOST and this text. Waits on
 * devices end at once. Any thread; does nothing where it has failed already. */
AR_API int32_t ar_comm_lose(ar_comm* comm, int32_t rank, const char* text, ar_error* error);

/* Path peer across processes. Each process exports its ranks' rings (device memory of the library's own), all exchange the
 * handles, each imports those of all ranks. Then each checks: with look 0 it stores a pattern into the others' rings, and, once
 * all have done that, with look 1 it looks at what has arrived in its own. Then path peer exists; before, ar_comm_has_path
 * says what is missing. No process may use the path before all have looked: on the way the processes wait for each other three
 * times, by means of their own. AR_ERR_UNSUPPORTED: the path does not exist here, another process's memory cannot be opened,
 * or stores do not arrive (which, is in the message); nothing else is lost. */
AR_API int32_t ar_comm_export_peer(ar_comm* comm, int32_t rank, uint8_t* handle, ar_error* error);
AR_API int32_t ar_comm_import_peers(ar_comm* comm, const uint8_t* handles,
                                    ar_error* error); /* world handles, by rank */
AR_API int32_t ar_comm_check_peers(ar_comm* comm, int32_t look, ar_error* error);

/* Memory that NCCL reduces fastest: bytes on the device of each rank of this process, symmetric windows of NCCL 2.27 and
 * later, which path nccl then reads and writes directly. ptrs: one per rank of this process. All processes call it with the
 * same bytes. It is the communicator's, until that is freed and no graph holds it. AR_ERR_UNSUPPORTED where NCCL is not
 * there or has none; AR_ERR_NCCL: its own error. */
AR_API int32_t ar_comm_nccl_windows(ar_comm* comm, int64_t bytes, ar_ptr* ptrs, ar_error* error);

/* Whether a path exists for this communicator; if not, reason (of reason_bytes) says why in one sentence. */
AR_API int32_t ar_comm_has_path(const ar_comm* comm, int32_t path, char* reason, size_t reason_bytes);

/* Enqueues one reduction on the given path and returns; results are there once each buffer's stream has come
 * this far. bufs[i] is this process's i-th rank, n must be the number of those. wire is the type that travels: the payload's own, or
 * for AR_F32 payloads AR_BF16 or AR_F16. AR_ERR_ALLOC and AR_ERR_UNSUPPORTED mean that nothing was enqueued and the
 * caller may name another path. */
AR_API int32_t ar_allreduce(ar_comm* comm, const ar_buffer* bufs, int32_t n, int32_t path, int32_t wire,
                            ar_error* error);

/* Allocates what reductions of up to max_bytes (payload per rank) on the given path need and loads every kernel
 * it may launch, so that no later call does. */
AR_API int32_t ar_comm_prepare(ar_comm* comm, int64_t max_bytes, int32_t path, ar_error* error);

/* Waits until the eager calls made so far have ended, at most timeout_us (AR_ERR_PENDING after that; negative:
 * no limit). Returns a latched failure of the communicator instead if there is one. */
AR_API int32_t ar_comm_wait(ar_comm* comm, int64_t timeout_us, ar_error* error);

/* The latched failure of the communicator, AR_OK if there is none. Never waits. */
AR_API int32_t ar_comm_error(ar_comm* comm, ar_error* error);

AR_API int32_t ar_comm_stats(ar_comm* comm, ar_stats* stats);

/* Ends the communicator: waits for the eager calls made so far (at most 1 s in all), then sets the abort word, so
 * that kernels still waiting end. What graphs or the device still use is freed later. The handle stays valid for
 * ar_comm_error and ar_comm_close (both cheap) until ar_comm_free. Idempotent. */
AR_API int32_t ar_comm_close(ar_comm* comm, ar_error* error);
/* Closes if need be and releases the handle. */
AR_API void ar_comm_free(ar_comm* comm);

/* ---- devices: the little a program without CUDA bindings needs ---------------------------------------------- */

typedef struct ar_device_info {
  char name[128];
  char uuid[48];   /* "GPU-..." */
  char bus_id[32]; /* "0000:1b:00.0" */
  int32_t cc_major, cc_minor;
  int32_t sms;
  int32_t copy_engines;
  int64_t memory_bytes;
  int32_t simulated; /* 1: an emulated device */
  int32_t reserved;
} ar_device_info;

AR_API int32_t ar_device_count(int32_t backend, int32_t* count, ar_error* error);
AR_API int32_t ar_device_get_info(int32_t backend, int32_t device, ar_device_info* info, ar_error* error);
/* can: 1 if the driver says that `device` may access `peer`'s memory. The driver's word is not proof. */
AR_API int32_t ar_device_can_access_peer(int32_t backend, int32_t device, int32_t peer, int32_t* can, ar_error* error);
AR_API int32_t ar_device_malloc(int32_t backend, int32_t device, int64_t bytes, ar_ptr* ptr, ar_error* error);
AR_API int32_t ar_device_free(int32_t backend, int32_t device, ar_ptr ptr, ar_error* error);
/* Pinned host memory; ptr is valid on the host and on every device. */
AR_API int32_t ar_host_malloc(int32_t backend, int64_t bytes, ar_ptr* ptr, ar_error* error);
AR_API int32_t ar_host_free(int32_t backend, ar_ptr ptr, ar_error* error);
/* Copies and waits. Host memory may be of any kind. */
AR_API int32_t ar_copy_to_device(int32_t backend, int32_t device, ar_ptr dst, const void* src, int64_t bytes,
                                 ar_error* error);
AR_API int32_t ar_copy_to_host(int32_t backend, int32_t device, void* dst, ar_ptr src, int64_t bytes, ar_error* error);
/* Device-to-device copy on one device, and fill with a byte, both enqueued on a stream. */
AR_API int32_t ar_copy_async(int32_t backend, int32_t device, ar_ptr dst, ar_ptr src, int64_t bytes, ar_stream stream,
                             ar_error* error);
AR_API int32_t ar_fill_async(int32_t backend, int32_t device, ar_ptr dst, int32_t byte, int64_t bytes, ar_stream stream,
                             ar_error* error);
/* A stream that does not synchronise with the legacy default stream. */
AR_API int32_t ar_stream_create(int32_t backend, int32_t device, ar_stream* stream, ar_error* error);
AR_API int32_t ar_stream_destroy(int32_t backend, int32_t device, ar_stream stream, ar_error* error);
AR_API int32_t ar_stream_synchronize(int32_t backend, int32_t device, ar_stream stream, ar_error* error);
AR_API int32_t ar_stream_query(int32_t backend, int32_t device, ar_stream stream, ar_error* error);
AR_API int32_t ar_device_synchronize(int32_t backend, int32_t device, ar_error* error);

typedef uint64_t ar_event;
AR_API int32_t ar_event_create(int32_t backend, int32_t device, ar_event* event, ar_error* error);
AR_API int32_t ar_event_destroy(int32_t backend, int32_t device, ar_event event, ar_error* error);
AR_API int32_t ar_event_record(int32_t backend, int32_t device, ar_event event, ar_stream stream, ar_error* error);
AR_API int32_t ar_event_wait(int32_t backend, int32_t device, ar_event event, ar_stream stream, ar_error* error);
AR_API int32_t ar_event_synchronize(int32_t backend, int32_t device, ar_event event, ar_error* error);
AR_API int32_t ar_event_elapsed_us(int32_t backend, int32_t device, ar_event start, ar_event stop, double* us,
                                   ar_error* error);

typedef uint64_t ar_graph;
/* Captures are begun in relaxed mode; *graph is an instantiated graph, launched any number of times. */
AR_API int32_t ar_capture_begin(int32_t backend, int32_t device, ar_stream stream, ar_error* error);
AR_API int32_t ar_capture_end(int32_t backend, int32_t device, ar_stream stream, ar_graph* graph, ar_error* error);
AR_API int32_t ar_graph_launch(int32_t backend, int32_t device, ar_graph graph, ar_stream stream, ar_error* error);
AR_API int32_t ar_graph_destroy(int32_t backend, int32_t device, ar_graph graph, ar_error* error);

/* ---- trace: what ran when, for timelines ---------------------------------------------------------------------- */

typedef enum ar_trace_kind {
  AR_TRACE_KERNEL = 0,
  AR_TRACE_HOST_TO_DEVICE = 1,
  AR_TRACE_DEVICE_TO_HOST = 2,
  AR_TRACE_DEVICE_TO_DEVICE = 3,
  AR_TRACE_OTHER = 4 /* a fill, for instance */
} ar_trace_kind;

/* One operation that the library enqueued: microseconds on one clock for all devices, whose zero means nothing. */
typedef struct ar_trace_record {
  double start_us, end_us;
  int32_t device;
  int32_t kind; /* ar_trace_kind */
  uint64_t stream;
  int64_t bytes; /* of a copy or fill */
  char name[32]; /* the kernel's, "copy" or "fill" */
} ar_trace_record;

/* From now on what this library enqueues on n of the machine's devices is recorded; earlier records are dropped. Waits for
 * the devices. On CUDA by two timing events around each operation (2 us of host time; the devices' clocks are compared
 * through the host, to a few microseconds), and only what goes to a stream at once: not graphs. On emulated devices in
 * simulated time, graphs too. One trace at a time in a process. */
AR_API int32_t ar_trace_start(int32_t backend, const int32_t* devices, int32_t n, ar_error* error);
/* What is enqueued later is not recorded. May wait for the devices. */
AR_API int32_t ar_trace_stop(int32_t backend, ar_error* error);
/* Up to n records to out, in the order of their ends; have: how many there are. Waits for what was recorded. */
AR_API int32_t ar_trace_read(int32_t backend, ar_trace_record* out, int64_t n, int64_t* have, ar_error* error);

/* ---- probe: proof of peer access ------------------------------------------------------------------------------ */

typedef enum ar_probe_verdict {
  AR_PROBE_OK = 0,
  AR_PROBE_SLOW = 1,         /* right, but slower than staging through the host */
  AR_PROBE_BROKEN = 2,       /* bytes did not arrive, or not in order */
  AR_PROBE_UNSUPPORTED = 3,  /* the driver denies it */
  AR_PROBE_INCONCLUSIVE = 4, /* the control through pinned memory failed: nothing can be said of peer access */
  AR_PROBE_TIMEOUT = 5       /* the process of the probe had to be ended (never given by ar_probe_pair itself) */
} ar_probe_verdict;

typedef struct ar_probe_result {
  int32_t verdict; /* ar_probe_verdict */
  int32_t reserved;
  double copy_gbs;   /* peer copies of 1 MiB, one behind another */
  double store_gbs;  /* stores of a kernel */
  double staged_gbs; /* the same copies through pinned host memory */
  double latency_us; /* a flagged message of 4 KiB, one way */
  char detail[232];  /* why, for people; "" with AR_PROBE_OK */
} ar_probe_result;

/* Whether device may store to, load from and copy to peer's memory: one ordered pair, with data checked by the owner from
 * its own memory. Takes about a second and 16 MiB on each device. Peer access stays enabled. Where access is broken this
 * may never return, and may end the process's context: call it in a process of its own that can be killed (`allreduce
 * probe` does). timeout_ms is the deadline of each wait of a kernel. AR_OK means that there is a verdict. */
AR_API int32_t ar_probe_pair(int32_t backend, int32_t device, int32_t peer, int32_t timeout_ms, ar_probe_result* result,
                             ar_error* error);

/* ---- benchmarks: what measurements need beside reductions ---------------------------------------------------- */

typedef enum ar_copy_kind {
  AR_COPY_HOST_TO_DEVICE = 0,
  AR_COPY_DEVICE_TO_HOST = 1,
  AR_COPY_DEVICE_TO_DEVICE = 2
} ar_copy_kind;

/* Enqueues a copy of bytes on a stream of device; host memory is ar_host_malloc's. */
AR_API int32_t ar_copy_kind_async(int32_t backend, int32_t device, ar_ptr dst, ar_ptr src, int64_t bytes, int32_t kind,
                                  ar_stream stream, ar_error* error);

/* Enqueues a compute kernel of so many blocks, each of which fills one SM (no other block fits beside it) for `rounds`
 * rounds of about a quarter of a microsecond. It touches no memory. The caller calibrates it. */
AR_API int32_t ar_bench_load(int32_t backend, int32_t device, int32_t blocks, int64_t rounds, ar_stream stream,
                             ar_error* error);

/* What to compare: rows of count elements at got and at want, pitch bytes apart (device memory). type: AR_F32, AR_F16 or
 * AR_BF16. tolerance 0: bits must be equal; else values may differ by as much. */
typedef struct ar_bench_rows {
  ar_ptr got;
  ar_ptr want;
  int64_t rows;
  int64_t count;
  int64_t pitch;
  int32_t type;
  float tolerance;
} ar_bench_rows;

/* The number of counters ar_bench_compare adds to. */
#define AR_BENCH_COUNTERS 65536

/* Enqueues a comparison: the number of elements that differ is added up over the AR_BENCH_COUNTERS 32-bit counters at
 * wrong (device memory). */
AR_API int32_t ar_bench_compare(int32_t backend, int32_t device, const ar_bench_rows* rows, ar_ptr wrong,
                                ar_stream stream, ar_error* error);

#ifdef __cplusplus
}
#endif
#endif /* ALLREDUCE_H */
