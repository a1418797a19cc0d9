//go:build !cgo || !linux || !(amd64 || arm64)

package core

import "runtime"

// This build has no C core: the same functions as in core_cgo.go, device_cgo.go and emulated_cgo.go, each failing with
// ErrNoCgo, or ErrPlatform elsewhere than on Linux on amd64 and arm64.

var absent = stubError()

func stubError() *Error {
	if runtime.GOOS != "linux" || (runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64") {
		return newError(StatusPlatform, runtime.GOOS+"/"+runtime.GOARCH+" is not supported; supported: linux/amd64 and linux/arm64")
	}
	return newError(StatusNoCgo, "this program was built with CGO_ENABLED=0: build it with cgo and a C++17 compiler")
}

// Available says why this build has no C core.
func Available() *Error { return absent }

// Version is empty without the C core.
func Version() string { return "" }

// SourceHash is 0 without the C core.
func SourceHash() uint64 { return 0 }

// HasBackend is false without the C core.
func HasBackend(int32) bool { return false }

// RuntimeVersion is 0 without the C core.
func RuntimeVersion(int32) int { return 0 }

// Comm never exists without the C core.
type Comm struct{}

// CreateComm fails without the C core.
func CreateComm(Options) (*Comm, *Error) { return nil, absent }

// SharedBytes is 0 without the C core.
func SharedBytes(int, int64) int64 { return 0 }

// NCCLID fails without the C core.
func NCCLID(int32, string, bool) ([]byte, *Error) { return nil, absent }

// ExportPeer fails without the C core.
func (*Comm) ExportPeer(int) ([]byte, *Error) { return nil, absent }

// ImportPeers fails without the C core.
func (*Comm) ImportPeers([][]byte) *Error { return absent }

// NCCLWindows fails without the C core.
func (*Comm) NCCLWindows(int64, int) ([]uint64, *Error) { return nil, absent }

// CheckPeers fails without the C core.
func (*Comm) CheckPeers(bool) *Error { return absent }

// Lose does nothing without the C core.
func (*Comm) Lose(int, string) {}

// HasPath is false without the C core.
func (*Comm) HasPath(int32) (bool, string) { return false, absent.Message }

// AllReduce fails without the C core.
func (*Comm) AllReduce(*Buffer, int, int32, int32) *Error { return absent }

// Prepare fails without the C core.
func (*Comm) Prepare(int64, int32) *Error { return absent }

// Wait fails without the C core.
func (*Comm) Wait(int64) *Error { return absent }

// Err fails without the C core.
func (*Comm) Err() *Error { return absent }

// Stats is empty without the C core.
func (*Comm) Stats() Stats { return Stats{} }

// Close fails without the C core.
func (*Comm) Close() *Error { return absent }

// Free does nothing without the C core.
func (*Comm) Free() {}

// DeviceCount fails without the C core.
func DeviceCount(int32) (int, *Error) { return 0, absent }

// GetDeviceInfo fails without the C core.
func GetDeviceInfo(int32, int) (DeviceInfo, *Error) { return DeviceInfo{}, absent }

// CanAccessPeer fails without the C core.
func CanAccessPeer(int32, int, int) (bool, *Error) { return false, absent }

// Malloc fails without the C core.
func Malloc(int32, int, int64) (uint64, *Error) { return 0, absent }

// Free fails without the C core.
func Free(int32, int, uint64) *Error { return absent }

// MallocHost fails without the C core.
func MallocHost(int32, int64) (uint64, *Error) { return 0, absent }

// FreeHost fails without the C core.
func FreeHost(int32, uint64) *Error { return absent }

// CopyToDevice fails without the C core.
func CopyToDevice(int32, int, uint64, []byte) *Error { return absent }

// CopyToHost fails without the C core.
func CopyToHost(int32, int, []byte, uint64) *Error { return absent }

// CopyAsync fails without the C core.
func CopyAsync(int32, int, uint64, uint64, int64, uint64) *Error { return absent }

// FillAsync fails without the C core.
func FillAsync(int32, int, uint64, byte, int64, uint64) *Error { return absent }

// StreamCreate fails without the C core.
func StreamCreate(int32, int) (uint64, *Error) { return 0, absent }

// StreamDestroy fails without the C core.
func StreamDestroy(int32, int, uint64) *Error { return absent }

// StreamSynchronize fails without the C core.
func StreamSynchronize(int32, int, uint64) *Error { return absent }

// StreamQuery fails without the C core.
func StreamQuery(int32, int, uint64) *Error { return absent }

// DeviceSynchronize fails without the C core.
func DeviceSynchronize(int32, int) *Error { return absent }

// EventCreate fails without the C core.
func EventCreate(int32, int) (uint64, *Error) { return 0, absent }

// EventDestroy fails without the C core.
func EventDestroy(int32, int, uint64) *Error { return absent }

// EventRecord fails without the C core.
func EventRecord(int32, int, uint64, uint64) *Error { return absent }

// EventWait fails without the C core.
func EventWait(int32, int, uint64, uint64) *Error { return absent }

// EventSynchronize fails without the C core.
func EventSynchronize(int32, int, uint64) *Error { return absent }

// EventElapsedUs fails without the C core.
func EventElapsedUs(int32, int, uint64, uint64) (float64, *Error) { return 0, absent }

// CaptureBegin fails without the C core.
func CaptureBegin(int32, int, uint64) *Error { return absent }

// CaptureEnd fails without the C core.
func CaptureEnd(int32, int, uint64) (uint64, *Error) { return 0, absent }

// GraphLaunch fails without the C core.
func GraphLaunch(int32, int, uint64, uint64) *Error { return absent }

// GraphDestroy fails without the C core.
func GraphDestroy(int32, int, uint64) *Error { return absent }

// CopyKindAsync fails without the C core.
func CopyKindAsync(int32, int, uint64, uint64, int64, int32, uint64) *Error { return absent }

// BenchLoad fails without the C core.
func BenchLoad(int32, int, int, int64, uint64) *Error { return absent }

// BenchCompare fails without the C core.
func BenchCompare(int32, int, BenchRows, uint64, uint64) *Error { return absent }

// ProbePair fails without the C core.
func ProbePair(int32, int, int, int) (ProbeResult, *Error) { return ProbeResult{}, absent }

// EmulatedPeerFault fails without the C core.
func EmulatedPeerFault(int, int, int32) *Error { return absent }

// EmulatedDefaults gives devices with every field at its default (zero) without the C core.
func EmulatedDefaults(n int) EmulatedMachine {
	m := EmulatedMachine{Devices: make([]EmulatedDevice, max(1, min(n, MaxEmulatedDevices)))}
	for i := range m.Devices {
		m.Devices[i].Uplink = -1
	}
	return m
}

// EmulatedConfigure fails without the C core.
func EmulatedConfigure(EmulatedMachine, bool) *Error { return absent }

// EmulatedNowUs is 0 without the C core.
func EmulatedNowUs() float64 { return 0 }

// EmulatedFail does nothing without the C core.
func EmulatedFail(int32, int64) {}

// EmulatedMutate does nothing without the C core.
func EmulatedMutate(int32) {}

// EmulatedOrders is empty without the C core.
func EmulatedOrders() []EmulatedOrder { return nil }

// TraceStart fails without the C core.
func TraceStart(int32, []int) *Error { return absent }

// TraceStop fails without the C core.
func TraceStop(int32) *Error { return absent }

// TraceRead fails without the C core.
func TraceRead(int32) ([]TraceRecord, *Error) { return nil, absent }

// EmulatedReport is empty without the C core.
func EmulatedReport() string { return "" }

// EmulatedHazards is 0 without the C core.
func EmulatedHazards() int64 { return 0 }

// EmulatedLiveObjects is 0 without the C core.
func EmulatedLiveObjects() int64 { return 0 }
