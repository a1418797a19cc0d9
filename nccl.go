package allreduce

// The nccl path as Go sees it: which library to open and what it serves. The path itself is csrc/transports/nccl.cpp; that
// a library is absent, too old or no NCCL at all is the core's to find, and its reason reaches Route and the errors.

// defaultNCCL is opened where nothing names a library.
const defaultNCCL = "libnccl.so.2"

// ncclTypes are the payloads NCCL takes: every type there is.
var ncclTypes = typesOf(F32, F16, BF16, F64, I64, I32, I8, U8)

// ncclLibrary is the library to open, "" for none. Emulated devices cannot use a real NCCL, so theirs must be named.
func ncclLibrary(s *settings, backend Backend) string {
	if backend == BackendEmulated && s.ncclLib == defaultNCCL {
		return ""
	}
	return s.ncclLib
}
