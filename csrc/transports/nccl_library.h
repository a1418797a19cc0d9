// Opening libnccl at run time. A library once opened stays: NCCL has threads of its own.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "nccl_api.h"

namespace ar {
namespace nccl {

struct Library {
  Api api{};
  int version = 0;
  std::string path;
  std::string missing;  // why it cannot be used, "" if it can
};

inline std::string version_text(int v) {
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

// What emulated devices offer an emulated NCCL (csrc/emulated/nccl.h); its bind function also tells the two kinds apart.
constexpr const char* kBindSymbol = "ar_emulated_nccl_bind";

// Gives dlopen's handle.
inline void* open(const std::string& path, bool simulated, const void* host, Library* lib) {
  lib->path = path;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    lib->missing = std::string("no NCCL: ") + (why != nullptr ? why : path.c_str());
    return handle;
  }
  auto bind = reinterpret_cast<void (*)(const void*)>(dlsym(handle, kBindSymbol));
  if (simulated && bind == nullptr) {
    lib->missing = path + " is a real NCCL: emulated devices need the emulated one (build/libnccl-emulated.so)";
    return handle;
  }
  if (!simulated && bind != nullptr) {
    lib->missing = path + " is the emulated NCCL: it serves emulated devices only";
    return handle;
  }
  const struct {
    const char* name;
    void** slot;
  } symbols[] = {
      {"ncclGetVersion", reinterpret_cast<void**>(&lib->api.GetVersion)},
      {"ncclGetUniqueId", reinterpret_cast<void**>(&lib->api.GetUniqueId)},
      {"ncclCommInitRankConfig", reinterpret_cast<void**>(&lib->api.CommInitRankConfig)},
      {"ncclCommDestroy", reinterpret_cast<void**>(&lib->api.CommDestroy)},
      {"ncclCommAbort", reinterpret_cast<void**>(&lib->api.CommAbort)},
      {"ncclCommGetAsyncError", reinterpret_cast<void**>(&lib->api.CommGetAsyncError)},
      {"ncclGetErrorString", reinterpret_cast<void**>(&lib->api.GetErrorString)},
      {"ncclGetLastError", reinterpret_cast<void**>(&lib->api.GetLastError)},
      {"ncclAllReduce", reinterpret_cast<void**>(&lib->api.AllReduce)},
      {"ncclGroupStart", reinterpret_cast<void**>(&lib->api.GroupStart)},
      {"ncclGroupEnd", reinterpret_cast<void**>(&lib->api.GroupEnd)},
  };
  // The version first: an old library lacks symbols, and its age is the better reason.
  *symbols[0].slot = dlsym(handle, symbols[0].name);
  if (lib->api.GetVersion == nullptr || lib->api.GetVersion(&lib->version) != kSuccess) {
    lib->missing = path + " has no working ncclGetVersion: it is no NCCL";
    return handle;
  }
  if (lib->version < kOldest) {
    lib->missing = path + " is NCCL " + version_text(lib->version) + ": 2.18.0 or later is needed";
    return handle;
  }
  for (const auto& s : symbols) {
    *s.slot = dlsym(handle, s.name);
    if (*s.slot == nullptr) {
      lib->missing = path + " (NCCL " + version_text(lib->version) + ") lacks " + s.name;
      return handle;
    }
  }
  Api& api = lib->api;
  api.MemAlloc = reinterpret_cast<decltype(api.MemAlloc)>(dlsym(handle, "ncclMemAlloc"));
  api.MemFree = reinterpret_cast<decltype(api.MemFree)>(dlsym(handle, "ncclMemFree"));
  api.CommWindowRegister = reinterpret_cast<decltype(api.CommWindowRegister)>(dlsym(handle, "ncclCommWindowRegister"));
  if (api.MemAlloc == nullptr || api.MemFree == nullptr) api.CommWindowRegister = nullptr;
  if (bind != nullptr) bind(host);
  return handle;
}

// The library at `path`, opened once. A path that failed is tried again by the next communicator.
// p2p_disable: NCCL must not use peer access here. It reads NCCL_P2P_DISABLE once, so that is set before the first call,
// and a library that the host program (or an earlier communicator) may have used without it is refused. That the variable is
// set by now says nothing about the libraries that were loaded before we set it.
inline Library find(const std::string& path, bool simulated, const void* host, bool p2p_disable) {
  static std::mutex mutex;
  static auto* opened = new std::map<std::string, Library>;
  static auto* without_peers = new std::map<void*, bool>;  // by dlopen's handle: one library may have several paths
  static bool set_here = false;
  std::lock_guard<std::mutex> lock(mutex);
  const auto set = [] {
    const char* value = std::getenv("NCCL_P2P_DISABLE");
    return value != nullptr && std::string(value) == "1";
  };
  void* loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (p2p_disable) {
    const bool from_the_start = set() && !set_here;
    const auto known = without_peers->find(loaded);
    if (loaded != nullptr && !from_the_start && (known == without_peers->end() || !known->second)) {
      dlclose(loaded);
      Library refused;
      refused.path = path;
      refused.missing =
          path +
          " was already in use in this process without NCCL_P2P_DISABLE=1, which this machine's peer access "
          "needs: set it before the program starts";
      return refused;
    }
    if (!set()) {
      setenv("NCCL_P2P_DISABLE", "1", 1);
      set_here = true;
    }
  }
  if (loaded != nullptr) dlclose(loaded);
  const auto it = opened->find(path);
  if (it != opened->end()) return it->second;
  Library lib;
  void* handle = open(path, simulated, host, &lib);
  if (lib.missing.empty()) (*opened)[path] = lib;
  // Loaded before, by the host program: nothing is known of it, unless the variable was always there.
  if (handle != nullptr) without_peers->emplace(handle, set() && (loaded == nullptr || !set_here));
  return lib;
}

}  // namespace nccl
}  // namespace ar
