//go:build cgo && linux && (amd64 || arm64)

package core

// #include "allreduce.h"
import "C"

import "unsafe"

// DeviceCount is ar_device_count.
func DeviceCount(backend int32) (int, *Error) {
	if abiError != nil {
		return 0, abiError
	}
	var n C.int32_t
	e := blank()
	err := convert(C.ar_device_count(C.int32_t(backend), &n, &e), &e)
	return int(n), err
}

// GetDeviceInfo is ar_device_get_info.
func GetDeviceInfo(backend int32, dev int) (DeviceInfo, *Error) {
	var i C.ar_device_info
	e := blank()
	if err := convert(C.ar_device_get_info(C.int32_t(backend), C.int32_t(dev), &i, &e), &e); err != nil {
		return DeviceInfo{}, err
	}
	return DeviceInfo{
		Name: C.GoString(&i.name[0]), UUID: C.GoString(&i.uuid[0]), BusID: C.GoString(&i.bus_id[0]),
		CCMajor: int(i.cc_major), CCMinor: int(i.cc_minor),
		SMs: int(i.sms), CopyEngines: int(i.copy_engines),
		MemoryBytes: int64(i.memory_bytes), Simulated: i.simulated != 0,
	}, nil
}

// CanAccessPeer is ar_device_can_access_peer.
func CanAccessPeer(backend int32, dev, peer int) (bool, *Error) {
	var can C.int32_t
	e := blank()
	err := convert(C.ar_device_can_access_peer(C.int32_t(backend), C.int32_t(dev), C.int32_t(peer), &can, &e), &e)
	return can != 0, err
}

// Malloc is ar_device_malloc.
func Malloc(backend int32, dev int, bytes int64) (uint64, *Error) {
	var p C.ar_ptr
	e := blank()
	err := convert(C.ar_device_malloc(C.int32_t(backend), C.int32_t(dev), C.int64_t(bytes), &p, &e), &e)
	return uint64(p), err
}

// Free is ar_device_free.
func Free(backend int32, dev int, p uint64) *Error {
	e := blank()
	return convert(C.ar_device_free(C.int32_t(backend), C.int32_t(dev), C.ar_ptr(p), &e), &e)
}

// MallocHost is ar_host_malloc.
func MallocHost(backend int32, bytes int64) (uint64, *Error) {
	var p C.ar_ptr
	e := blank()
	err := convert(C.ar_host_malloc(C.int32_t(backend), C.int64_t(bytes), &p, &e), &e)
	return uint64(p), err
}

// FreeHost is ar_host_free.
func FreeHost(backend int32, p uint64) *Error {
	e := blank()
	return convert(C.ar_host_free(C.int32_t(backend), C.ar_ptr(p), &e), &e)
}

// CopyToDevice is ar_copy_to_device.
func CopyToDevice(backend int32, dev int, dst uint64, src []byte) *Error {
	e := blank()
	return convert(C.ar_copy_to_device(C.int32_t(backend), C.int32_t(dev), C.ar_ptr(dst),
		unsafe.Pointer(unsafe.SliceData(src)), C.int64_t(len(src)), &e), &e)
}

// CopyToHost is ar_copy_to_host.
func CopyToHost(backend int32, dev int, dst []byte, src uint64) *Error {
	e := blank()
	return convert(C.ar_copy_to_host(C.int32_t(backend), C.int32_t(dev),
		unsafe.Pointer(unsafe.SliceData(dst)), C.ar_ptr(src), C.int64_t(len(dst)), &e), &e)
}

// CopyAsync is ar_copy_async.
func CopyAsync(backend int32, dev int, dst, src uint64, bytes int64, stream uint64) *Error {
	e := blank()
	return convert(C.ar_copy_async(C.int32_t(backend), C.int32_t(dev), C.ar_ptr(dst), C.ar_ptr(src),
		C.int64_t(bytes), C.ar_stream(stream), &e), &e)
}

// FillAsync is ar_fill_async.
func FillAsync(backend int32, dev int, dst uint64, b byte, bytes int64, stream uint64) *Error {
	e := blank()
	return convert(C.ar_fill_async(C.int32_t(backend), C.int32_t(dev), C.ar_ptr(dst), C.int32_t(b),
		C.int64_t(bytes), C.ar_stream(stream), &e), &e)
}

// StreamCreate is ar_stream_create.
func StreamCreate(backend int32, dev int) (uint64, *Error) {
	var s C.ar_stream
	e := blank()
	err := convert(C.ar_stream_create(C.int32_t(backend), C.int32_t(dev), &s, &e), &e)
	return uint64(s), err
}

// StreamDestroy is ar_stream_destroy.
func StreamDestroy(backend int32, dev int, s uint64) *Error {
	e := blank()
	return convert(C.ar_stream_destroy(C.int32_t(backend), C.int32_t(dev), C.ar_stream(s), &e), &e)
}

// StreamSynchronize is ar_stream_synchronize.
func StreamSynchronize(backend int32, dev int, s uint64) *Error {
	e := blank()
	return convert(C.ar_stream_synchronize(C.int32_t(backend), C.int32_t(dev), C.ar_stream(s), &e), &e)
}

// StreamQuery is ar_stream_query: StatusPending while work is left.
func StreamQuery(backend int32, dev int, s uint64) *Error {
	e := blank()
	return convert(C.ar_stream_query(C.int32_t(backend), C.int32_t(dev), C.ar_stream(s), &e), &e)
}

// DeviceSynchronize is ar_device_synchronize.
func DeviceSynchronize(backend int32, dev int) *Error {
	e := blank()
	return convert(C.ar_device_synchronize(C.int32_t(backend), C.int32_t(dev), &e), &e)
}

// EventCreate is ar_event_create.
func EventCreate(backend int32, dev int) (uint64, *Error) {
	var ev C.ar_event
	e := blank()
	err := convert(C.ar_event_create(C.int32_t(backend), C.int32_t(dev), &ev, &e), &e)
	return uint64(ev), err
}

// EventDestroy is ar_event_destroy.
func EventDestroy(backend int32, dev int, ev uint64) *Error {
	e := blank()
	return convert(C.ar_event_destroy(C.int32_t(backend), C.int32_t(dev), C.ar_event(ev), &e), &e)
}

// EventRecord is ar_event_record.
func EventRecord(backend int32, dev int, ev, stream uint64) *Error {
	e := blank()
	return convert(C.ar_event_record(C.int32_t(backend), C.int32_t(dev), C.ar_event(ev), C.ar_stream(stream), &e), &e)
}

// EventWait is ar_event_wait.
func EventWait(backend int32, dev int, ev, stream uint64) *Error {
	e := blank()
	return convert(C.ar_event_wait(C.int32_t(backend), C.int32_t(dev), C.ar_event(ev), C.ar_stream(stream), &e), &e)
}

// EventSynchronize is ar_event_synchronize.
func EventSynchronize(backend int32, dev int, ev uint64) *Error {
	e := blank()
	return convert(C.ar_event_synchronize(C.int32_t(backend), C.int32_t(dev), C.ar_event(ev), &e), &e)
}

// EventElapsedUs is ar_event_elapsed_us.
func EventElapsedUs(backend int32, dev int, start, stop uint64) (float64, *Error) {
	var us C.double
	e := blank()
	err := convert(C.ar_event_elapsed_us(C.int32_t(backend), C.int32_t(dev), C.ar_event(start), C.ar_event(stop), &us, &e), &e)
	return float64(us), err
}

// CaptureBegin is ar_capture_begin.
func CaptureBegin(backend int32, dev int, stream uint64) *Error {
	e := blank()
	return convert(C.ar_capture_begin(C.int32_t(backend), C.int32_t(dev), C.ar_stream(stream), &e), &e)
}

// CaptureEnd is ar_capture_end.
func CaptureEnd(backend int32, dev int, stream uint64) (uint64, *Error) {
	var g C.ar_graph
	e := blank()
	err := convert(C.ar_capture_end(C.int32_t(backend), C.int32_t(dev), C.ar_stream(stream), &g, &e), &e)
	return uint64(g), err
}

// GraphLaunch is ar_graph_launch.
func GraphLaunch(backend int32, dev int, graph, stream uint64) *Error {
	e := blank()
	return convert(C.ar_graph_launch(C.int32_t(backend), C.int32_t(dev), C.ar_graph(graph), C.ar_stream(stream), &e), &e)
}

// GraphDestroy is ar_graph_destroy.
func GraphDestroy(backend int32, dev int, graph uint64) *Error {
	e := blank()
	return convert(C.ar_graph_destroy(C.int32_t(backend), C.int32_t(dev), C.ar_graph(graph), &e), &e)
}

// CopyKindAsync is ar_copy_kind_async.
func CopyKindAsync(backend int32, dev int, dst, src uint64, bytes int64, kind int32, stream uint64) *Error {
	e := blank()
	return convert(C.ar_copy_kind_async(C.int32_t(backend), C.int32_t(dev), C.ar_ptr(dst), C.ar_ptr(src),
		C.int64_t(bytes), C.int32_t(kind), C.ar_stream(stream), &e), &e)
}

// BenchLoad is ar_bench_load.
func BenchLoad(backend int32, dev, blocks int, rounds int64, stream uint64) *Error {
	e := blank()
	return convert(C.ar_bench_load(C.int32_t(backend), C.int32_t(dev), C.int32_t(blocks), C.int64_t(rounds),
		C.ar_stream(stream), &e), &e)
}

// BenchCompare is ar_bench_compare.
func BenchCompare(backend int32, dev int, r BenchRows, wrong, stream uint64) *Error {
	rows := C.ar_bench_rows{
		got: C.ar_ptr(r.Got), want: C.ar_ptr(r.Want),
		rows: C.int64_t(r.Rows), count: C.int64_t(r.Count), pitch: C.int64_t(r.Pitch),
		_type: C.int32_t(r.Type), tolerance: C.float(r.Tolerance),
	}
	e := blank()
	return convert(C.ar_bench_compare(C.int32_t(backend), C.int32_t(dev), &rows, C.ar_ptr(wrong), C.ar_stream(stream), &e), &e)
}

// ProbePair is ar_probe_pair: it may never return, and is for a process of its own.
func ProbePair(backend int32, dev, peer, timeoutMs int) (ProbeResult, *Error) {
	if abiError != nil {
		return ProbeResult{}, abiError
	}
	var r C.ar_probe_result
	e := blank()
	err := convert(C.ar_probe_pair(C.int32_t(backend), C.int32_t(dev), C.int32_t(peer), C.int32_t(timeoutMs), &r, &e), &e)
	return ProbeResult{
		Verdict: int32(r.verdict), CopyGBs: float64(r.copy_gbs), StoreGBs: float64(r.store_gbs),
		StagedGBs: float64(r.staged_gbs), LatencyUs: float64(r.latency_us), Detail: C.GoString(&r.detail[0]),
	}, err
}

// TraceStart is ar_trace_start.
func TraceStart(backend int32, devices []int) *Error {
	list := make([]C.int32_t, len(devices)+1)
	for i, d := range devices {
		list[i] = C.int32_t(d)
	}
	e := blank()
	return convert(C.ar_trace_start(C.int32_t(backend), &list[0], C.int32_t(len(devices)), &e), &e)
}

// TraceStop is ar_trace_stop.
func TraceStop(backend int32) *Error {
	e := blank()
	return convert(C.ar_trace_stop(C.int32_t(backend), &e), &e)
}

// TraceRead is ar_trace_read: all records there are.
func TraceRead(backend int32) ([]TraceRecord, *Error) {
	var have C.int64_t
	e := blank()
	if err := convert(C.ar_trace_read(C.int32_t(backend), nil, 0, &have, &e), &e); err != nil || have == 0 {
		return nil, err
	}
	raw := make([]C.ar_trace_record, have)
	if err := convert(C.ar_trace_read(C.int32_t(backend), &raw[0], have, &have, &e), &e); err != nil {
		return nil, err
	}
	out := make([]TraceRecord, min(len(raw), int(have)))
	for i := range out {
		r := &raw[i]
		out[i] = TraceRecord{
			StartUs: float64(r.start_us), EndUs: float64(r.end_us), Device: int32(r.device), Kind: int32(r.kind),
			Stream: uint64(r.stream), Bytes: int64(r.bytes), Name: C.GoString(&r.name[0]),
		}
	}
	return out, nil
}
