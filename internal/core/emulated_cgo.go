//go:build cgo && linux && (amd64 || arm64)

package core

// #include "allreduce.h"
// #include "allreduce_emulated.h"
import "C"

import "fmt"

// EmulatedDefaults is ar_emulated_defaults; n is brought into 1..MaxEmulatedDevices.
func EmulatedDefaults(n int) EmulatedMachine {
	n = max(1, min(n, MaxEmulatedDevices))
	var c C.ar_emulated_machine
	c.size = C.sizeof_ar_emulated_machine
	C.ar_emulated_defaults(&c, C.int32_t(n))
	m := EmulatedMachine{
		Devices: make([]EmulatedDevice, n),
		HostGBs: float64(c.host_gbs), PeerGBs: float64(c.peer_gbs),
		CopyUs: float64(c.copy_us), LaunchUs: float64(c.launch_us), HopUs: float64(c.hop_us), FlagUs: float64(c.flag_us),
		Drive: int32(c.drive), Schedule: int32(c.schedule), Seed: uint64(c.seed),
	}
	for i := range m.Devices {
		d := &c.device[i]
		m.Devices[i] = EmulatedDevice{
			H2DGBs: float64(d.h2d_gbs), D2HGBs: float64(d.d2h_gbs), DuplexGBs: float64(d.duplex_gbs),
			MemoryGBs: float64(d.memory_gbs), KernelHostGBs: float64(d.kernel_host_gbs),
			SMs: int32(d.sms), ResidentBlocks: int32(d.resident_blocks),
			CCMajor: int32(d.cc_major), CCMinor: int32(d.cc_minor), Uplink: int32(d.uplink),
			MemoryBytes: int64(d.memory_bytes),
		}
	}
	return m
}

// EmulatedConfigure is ar_emulated_configure.
func EmulatedConfigure(m EmulatedMachine, force bool) *Error {
	if abiError != nil {
		return abiError
	}
	n := len(m.Devices)
	if n < 1 || n > MaxEmulatedDevices || len(m.UplinkGBs) > MaxEmulatedDevices {
		return newError(StatusArgument, fmt.Sprintf("%d devices and %d uplinks; allowed: 1 to %d devices, up to %d uplinks",
			n, len(m.UplinkGBs), MaxEmulatedDevices, MaxEmulatedDevices))
	}
	var c C.ar_emulated_machine
	C.ar_emulated_defaults(&c, C.int32_t(n))
	c.size = C.sizeof_ar_emulated_machine
	for i, d := range m.Devices {
		c.device[i] = C.ar_emulated_device{
			h2d_gbs: C.double(d.H2DGBs), d2h_gbs: C.double(d.D2HGBs), duplex_gbs: C.double(d.DuplexGBs),
			memory_gbs: C.double(d.MemoryGBs), kernel_host_gbs: C.double(d.KernelHostGBs),
			sms: C.int32_t(d.SMs), resident_blocks: C.int32_t(d.ResidentBlocks),
			cc_major: C.int32_t(d.CCMajor), cc_minor: C.int32_t(d.CCMinor), uplink: C.int32_t(d.Uplink),
			memory_bytes: C.int64_t(d.MemoryBytes),
		}
	}
	for i, u := range m.UplinkGBs {
		c.uplink_gbs[i] = C.double(u)
	}
	for i, row := range m.Peer {
		for j, granted := range row {
			if i < n && j < n && granted {
				c.peer[i][j] = 1
			}
		}
	}
	setRate := func(to *C.double, v float64) {
		if v != 0 {
			*to = C.double(v)
		}
	}
	setRate(&c.host_gbs, m.HostGBs)
	setRate(&c.peer_gbs, m.PeerGBs)
	setRate(&c.copy_us, m.CopyUs)
	setRate(&c.launch_us, m.LaunchUs)
	setRate(&c.hop_us, m.HopUs)
	setRate(&c.flag_us, m.FlagUs)
	c.drive, c.schedule, c.seed = C.int32_t(m.Drive), C.int32_t(m.Schedule), C.uint64_t(m.Seed)
	var cForce C.int32_t
	if force {
		cForce = 1
	}
	e := blank()
	return convert(C.ar_emulated_configure(&c, cForce, &e), &e)
}

// EmulatedNowUs is ar_emulated_now_us.
func EmulatedNowUs() float64 { return float64(C.ar_emulated_now_us()) }

// EmulatedFail is ar_emulated_fail.
func EmulatedFail(call int32, nth int64) { C.ar_emulated_fail(C.int32_t(call), C.int64_t(nth)) }

// EmulatedMutate is ar_emulated_mutate.
func EmulatedMutate(order int32) { C.ar_emulated_mutate(C.int32_t(order)) }

// EmulatedOrders lists ar_emulated_order_name, _text and _count from id 1 on.
func EmulatedOrders() []EmulatedOrder {
	var out []EmulatedOrder
	for id := C.int32_t(1); ; id++ {
		name := C.ar_emulated_order_name(id)
		if name == nil {
			return out
		}
		out = append(out, EmulatedOrder{
			ID: int32(id), Name: C.GoString(name), Text: C.GoString(C.ar_emulated_order_text(id)),
			Count: int64(C.ar_emulated_order_count(id)),
		})
	}
}

// EmulatedReport is ar_emulated_report.
func EmulatedReport() string { return C.GoString(C.ar_emulated_report()) }

// EmulatedLiveObjects is ar_emulated_live_objects.
func EmulatedLiveObjects() int64 { return int64(C.ar_emulated_live_objects()) }

// EmulatedHazards is ar_emulated_hazards.
func EmulatedHazards() int64 { return int64(C.ar_emulated_hazards()) }

// EmulatedPeerFault is ar_emulated_peer_fault.
func EmulatedPeerFault(dev, peer int, fault int32) *Error {
	if C.ar_emulated_peer_fault(C.int32_t(dev), C.int32_t(peer), C.int32_t(fault)) == C.AR_OK {
		return nil
	}
	return newError(StatusArgument, fmt.Sprintf("fault %d between devices %d and %d of the emulated machine", fault, dev, peer))
}
