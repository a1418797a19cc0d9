/* allreduce.c: the C API without Go. Sums two vectors, one per device, on emulated devices (or GPUs with -cuda): a small
 * one by the path internal, a large one by the copy engines with a BF16 wire. In C the caller names path and wire.
 *
 * The emulated backend alone, with nothing but a compiler:
 *   g++ -std=c++17 -O2 -ffp-contract=off -pthread -Icsrc -Icsrc/include -c internal/core/core_emulated.cpp -o core.o
 *   gcc -Icsrc/include -c examples/c/allreduce.c -o example.o
 *   g++ example.o core.o -pthread -o example && ./example
 * Against what `make install PREFIX=...` put there:
 *   gcc examples/c/allreduce.c $(pkg-config --cflags --libs allreduce) -o example
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allreduce.h"
#include "allreduce_emulated.h"

enum { RANKS = 2 };

static ar_error error;

/* Every call fills `error` on failure; an example may end there. */
static void check(int32_t status, const char* call) {
  if (status == AR_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, ar_status_name(status), error.message);
  exit(2);
}
#define CHECK(call) check((call), #call)

static void reduce(ar_comm* comm, int32_t backend, int64_t count, int32_t path, int32_t wire) {
  const int64_t bytes = count * (int64_t)sizeof(float);
  float* values = malloc((size_t)bytes);
  ar_buffer buffers[RANKS];
  int64_t i, wrong = 0;
  int32_t rank;

  if (!values) exit(2);
  memset(buffers, 0, sizeof buffers);
  for (rank = 0; rank < RANKS; rank++) {
    ar_buffer* b = &buffers[rank];
    CHECK(ar_device_malloc(backend, rank, bytes, &b->send, &error));
    CHECK(ar_device_malloc(backend, rank, bytes, &b->recv, &error));
    CHECK(ar_stream_create(backend, rank, &b->stream, &error));
    b->count = count;
    b->type = AR_F32;
    b->op = AR_SUM;
    for (i = 0; i < count; i++) values[i] = (float)(rank + 1) * 0.5f;
    CHECK(ar_copy_to_device(backend, rank, b->send, values, bytes, &error));
  }

  CHECK(ar_allreduce(comm, buffers, RANKS, path, wire, &error)); /* enqueues and returns */

  for (rank = 0; rank < RANKS; rank++) {
    CHECK(ar_stream_synchronize(backend, rank, buffers[rank].stream, &error));
    CHECK(ar_copy_to_host(backend, rank, values, buffers[rank].recv, bytes, &error));
    for (i = 0; i < count; i++) wrong += values[i] != 1.5f; /* 0.5 + 1.0 */
    CHECK(ar_stream_destroy(backend, rank, buffers[rank].stream, &error));
    CHECK(ar_device_free(backend, rank, buffers[rank].send, &error));
    CHECK(ar_device_free(backend, rank, buffers[rank].recv, &error));
  }
  free(values);
  printf("%lld elements by %s, wire %s: %lld wrong\n", (long long)count, ar_path_name(path), ar_type_name(wire),
         (long long)wrong);
  if (wrong) exit(1);
}

int main(int argc, char** argv) {
  const int32_t backend = argc > 1 && !strcmp(argv[1], "-cuda") ? AR_BACKEND_CUDA : AR_BACKEND_EMULATED;
  ar_options options;
  ar_comm* comm = NULL;
  ar_stats stats;
  int32_t rank;

  if (ar_abi_version() != AR_ABI_VERSION) {
    fprintf(stderr, "header and library differ: ABI %d, %d\n", AR_ABI_VERSION, (int)ar_abi_version());
    return 2;
  }
  if (backend == AR_BACKEND_EMULATED) { /* the default machine, made here only to show how: two PCIe 5 x16 devices */
    ar_emulated_machine machine;
    ar_emulated_defaults(&machine, RANKS);
    CHECK(ar_emulated_configure(&machine, 0, &error));
  }

  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.backend = backend;
  options.world = RANKS;
  CHECK(ar_comm_create(&options, &comm, &error));

  reduce(comm, backend, 5120, AR_PATH_INTERNAL, AR_F32);
  reduce(comm, backend, 1 << 20, AR_PATH_COPY_ENGINE, AR_BF16);

  CHECK(ar_comm_stats(comm, &stats));
  for (rank = 0; rank < stats.ranks; rank++) {
    printf("rank %d holds %lld KiB pinned for %s, %lld KiB for %s\n", (int)rank,
           (long long)stats.rank[rank].pinned_bytes[AR_PATH_INTERNAL] >> 10, ar_path_name(AR_PATH_INTERNAL),
           (long long)stats.rank[rank].pinned_bytes[AR_PATH_COPY_ENGINE] >> 10, ar_path_name(AR_PATH_COPY_ENGINE));
  }
  CHECK(ar_comm_close(comm, &error));
  ar_comm_free(comm);
  if (backend == AR_BACKEND_EMULATED && ar_emulated_live_objects() != 0) {
    fprintf(stderr, "%lld emulated objects are still alive\n", (long long)ar_emulated_live_objects());
    return 1;
  }
  return 0;
}
