//go:build cgo && linux && (amd64 || arm64) && cuda

package core

// Both backends, from the archive that CMake and nvcc built (make). nvcc's static runtime needs rt, dl and pthread; the
// driver is looked up at run time, so that the program starts on a machine without one. The archive by its file name:
// an installed liballreduce.so beside it would win over -lallreduce. -lm by itself: go-nvml's flags hide its lack.

// #cgo CPPFLAGS: -I${SRCDIR}/../../csrc/include
// #cgo LDFLAGS: -L${SRCDIR}/../../build -l:liballreduce.a -lcudart_static -Wl,-Bstatic -lstdc++ -Wl,-Bdynamic -lm -lrt -ldl -lpthread
import "C"
