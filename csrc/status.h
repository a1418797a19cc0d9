// Errors: how every layer fills an ar_error. One function, so that no message is built twice.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "include/allreduce.h"

namespace ar {

// Where something went wrong; -1 where it does not apply.
struct Where {
  int rank = -1;
  int device = -1;
  int code = 0;  // the platform's own
};

inline void clear(ar_error* e) {
  if (e == nullptr) return;
  std::memset(e, 0, sizeof(*e));
  e->rank = e->device = e->peer = -1;
}

__attribute__((format(printf, 4, 5))) inline int32_t fail(ar_error* e, int32_t status, Where where, const char* format,
                                                          ...) {
  if (e == nullptr) return status;
  clear(e);
  e->status = status;
  e->platform_code = where.code;
  e->rank = where.rank;
  e->device = where.device;
  va_list args;
  va_start(args, format);
  std::vsnprintf(e->message, sizeof(e->message), format, args);
  va_end(args);
  return status;
}

constexpr int32_t type_size(int32_t t) {
  switch (t) {
    case AR_F32:
    case AR_I32:
      return 4;
    case AR_F16:
    case AR_BF16:
      return 2;
    case AR_F64:
    case AR_I64:
      return 8;
    case AR_I8:
    case AR_U8:
      return 1;
    default:
      return 0;
  }
}
constexpr const char* type_name(int32_t t) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "f64", "i64", "i32", "i8", "u8"};
  return t >= 0 && t < 8 ? names[t] : "unknown";
}
constexpr const char* path_name(int32_t p) {
  constexpr const char* names[] = {"none", "internal", "copy-engine", "peer", "nccl"};
  return p >= 0 && p < AR_PATHS ? names[p] : "unknown";
}

}  // namespace ar
