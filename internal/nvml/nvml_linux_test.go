//go:build cgo && linux

package nvml

import (
	"errors"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// workstation is two cards without peer access, as NVML's mocks give them and what they leave out filled in.
func workstation(t *testing.T) *server.Server {
	s, err := server.New(server.WithGPUs(gpus.A30_PCIE_24GB, gpus.H200_SXM5_141GB), server.WithDriverVersion("580.95"))
	require.NoError(t, err)
	for i, id := range []string{"00000000:19:00.0", "00000000:3B:00.0"} {
		d := s.Devices[i].(*server.Device)
		d.GetPciInfoFunc = func() (info nvml.PciInfo, ret nvml.Return) {
			for j := range id {
				info.BusId[j] = int8(id[j])
			}
			return info, nvml.SUCCESS
		}
		answer := func(n int) func() (int, nvml.Return) { return func() (int, nvml.Return) { return n, nvml.SUCCESS } }
		d.GetGpuMaxPcieLinkGenerationFunc, d.GetMaxPcieLinkGenerationFunc, d.GetMaxPcieLinkWidthFunc = answer(5), answer(4), answer(16)
		d.GetP2PStatusFunc = func(to nvml.Device, index nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
			if index == nvml.P2P_CAPS_INDEX_NVLINK {
				return nvml.P2P_STATUS_NOT_SUPPORTED, nvml.SUCCESS
			}
			return nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED, nvml.SUCCESS
		}
	}
	return s
}

func TestQuery(t *testing.T) {
	s := workstation(t)
	closed := 0
	s.ShutdownFunc = func() nvml.Return { closed++; return nvml.SUCCESS }
	info, err := query(s, Options{SysfsRoot: machine(t)})
	require.NoError(t, err)
	assert.Equal(t, 1, closed)
	assert.Equal(t, "580.95", info.Driver)
	assert.Empty(t, info.Warnings)
	require.Len(t, info.Devices, 2)
	first := info.Devices[0]
	assert.Equal(t, Device{Index: 0, UUID: first.UUID, BusID: "0000:19:00.0", Name: "NVIDIA A30-PCIE-24GB", CardGen: 5, CardWidth: 16,
		LinkGen: 4, LinkWidth: 16, SlotGen: 4, SlotWidth: 8}, first)
	assert.Contains(t, first.UUID, "GPU-")
	gen, width := first.MaxLink()
	assert.Equal(t, [2]int{4, 8}, [2]int{gen, width})
	second := info.ByBusID("0000:3b:00.0")
	require.NotNil(t, second)
	assert.Equal(t, 1, second.Index)
	assert.Zero(t, second.SlotWidth, "sysfs does not know it")
	assert.Nil(t, info.ByBusID("0000:40:00.0"))
	no := P2P{Read: ChipsetNotSupported, Write: ChipsetNotSupported, Atomics: ChipsetNotSupported, NVLink: NotSupported}
	assert.Equal(t, [][]P2P{{{}, no}, {no, {}}}, info.P2P)
}

// Until Init has succeeded nothing else may be called: the mock panics on every call it has no function for.
func TestQueryWithoutLibrary(t *testing.T) {
	for _, ret := range []nvml.Return{nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIB_RM_VERSION_MISMATCH} {
		info, err := query(&mock.Interface{InitFunc: func() nvml.Return { return ret }}, Options{})
		assert.Nil(t, info)
		require.True(t, errors.Is(err, ErrNotAvailable))
		assert.ErrorContains(t, err, ret.Error())
	}
	info, err := query(nvml.New(nvml.WithLibraryPath("/does/not/exist.so")), Options{})
	assert.Nil(t, info)
	assert.ErrorIs(t, err, ErrNotAvailable)
}

// What one device cannot answer is unknown, not an error, and hides nothing else.
func TestQueryWithFailures(t *testing.T) {
	s := workstation(t)
	lost := s.Devices[0].(*server.Device)
	unsupported := func() (int, nvml.Return) { return 3, nvml.ERROR_NOT_SUPPORTED }
	lost.GetMaxPcieLinkWidthFunc, lost.GetMaxPcieLinkGenerationFunc = unsupported, unsupported
	lost.GetNameFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }
	lost.GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) { return 99, nvml.SUCCESS }
	info, err := query(s, Options{SysfsRoot: t.TempDir()})
	require.NoError(t, err)
	assert.Equal(t, []string{"NVML: device 0: name: " + nvml.ERROR_GPU_IS_LOST.Error()}, info.Warnings)
	assert.Zero(t, info.Devices[0].LinkWidth)
	assert.Equal(t, 5, info.Devices[0].CardGen)
	assert.Equal(t, Unknown, info.P2P[0][1].Read)

	s.DeviceGetHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		if index == 0 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return s.Devices[index], nvml.SUCCESS
	}
	info, err = query(s, Options{})
	require.NoError(t, err)
	require.Len(t, info.Devices, 1)
	assert.Equal(t, 1, info.Devices[0].Index)
	assert.Len(t, info.Warnings, 1)

	s.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
	_, err = query(s, Options{})
	assert.ErrorIs(t, err, ErrNotAvailable)
}

// An older driver's library lacks newer calls; making one would end the process.
func TestQueryOldLibrary(t *testing.T) {
	s := workstation(t)
	s.LookupSymbolFunc = func(string) error { return errors.New("undefined symbol") }
	for _, device := range s.Devices {
		d := device.(*server.Device)
		d.GetGpuMaxPcieLinkGenerationFunc, d.GetMaxPcieLinkGenerationFunc, d.GetMaxPcieLinkWidthFunc, d.GetP2PStatusFunc = nil, nil, nil, nil
	}
	info, err := query(s, Options{SysfsRoot: t.TempDir()})
	require.NoError(t, err)
	assert.Empty(t, info.Warnings)
	assert.Equal(t, P2P{}, info.P2P[0][1])
	assert.Zero(t, info.Devices[1].CardGen)
}
