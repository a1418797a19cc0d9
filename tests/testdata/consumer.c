/* A C program against an installed allreduce.h: one reduction of two ranks on emulated devices. */
#include <allreduce.h>
#include <stdio.h>

#define TRY(call)                                                                  \
  do {                                                                             \
    if ((call) != AR_OK) {                                                         \
      fprintf(stderr, "%s: %s: %s\n", #call, ar_status_name(e.status), e.message); \
      return 1;                                                                    \
    }                                                                              \
  } while (0)

int main(void) {
  ar_error e;
  ar_comm* comm = NULL;
  ar_options options = {0};
  ar_buffer bufs[2] = {{0}};
  float values[4] = {1, 2, 3, 4};
  int r;

  if (ar_abi_version() != AR_ABI_VERSION) {
    fprintf(stderr, "header and library differ\n");
    return 1;
  }
  options.size = sizeof(options);
  options.backend = AR_BACKEND_EMULATED;
  options.world = 2;
  TRY(ar_comm_create(&options, &comm, &e));
  for (r = 0; r < 2; r++) {
    ar_ptr p;
    TRY(ar_device_malloc(AR_BACKEND_EMULATED, r, sizeof(values), &p, &e));
    TRY(ar_copy_to_device(AR_BACKEND_EMULATED, r, p, values, sizeof(values), &e));
    bufs[r].send = bufs[r].recv = p;
    bufs[r].count = 4;
    bufs[r].type = AR_F32;
  }
  TRY(ar_allreduce(comm, bufs, 2, AR_PATH_INTERNAL, AR_F32, &e));
  TRY(ar_comm_wait(comm, -1, &e));
  TRY(ar_copy_to_host(AR_BACKEND_EMULATED, 1, values, bufs[1].recv, sizeof(values), &e));
  for (r = 0; r < 2; r++) TRY(ar_device_free(AR_BACKEND_EMULATED, r, bufs[r].recv, &e));
  ar_comm_free(comm);
  printf("%s %g %g %g %g\n", ar_version(), values[0], values[1], values[2], values[3]);
  return 0;
}
