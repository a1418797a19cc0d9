package allreduce

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gpu.example/allreduce/internal/core"
	"gpu.example/allreduce/internal/verdicts"
)

// probePatience is what a probe command gets for each pair; the command itself ends a pair that hangs sooner.
const probePatience = 60 * time.Second

// verdictOf are the words of the cache.
var verdictOf = map[string]verdict{
	verdicts.OK: verdictProven, verdicts.Slow: verdictSlow, verdicts.Broken: verdictBroken,
	verdicts.Unsupported: verdictUnsupported, verdicts.Inconclusive: verdictInconclusive, verdicts.Timeout: verdictTimeout,
}

// peerAccess is what is known about peer access between a communicator's devices.
type peerAccess struct {
	verdict  verdict
	why      string // pair and numbers behind a verdict that is neither ok nor denied
	warnings []string
}

// allowed says whether the peer path may exist: proven, or trusted, and nobody forbade it.
func (p *peerAccess) allowed(s *settings) bool {
	wanted := s.algorithm == AlgorithmAuto || s.algorithm == AlgorithmPeer
	granted := p.verdict != verdictDenied && p.verdict != verdictOneDevice
	return wanted && granted && s.p2p != P2POff && !s.ncclP2PDisable && (p.verdict == verdictProven || s.p2p == P2PTrust)
}

// forbidsNCCL says whether NCCL must not use peer access either: the user forbade it, or it was found broken.
func (p *peerAccess) forbidsNCCL(s *settings) bool {
	broken := p.verdict == verdictBroken || p.verdict == verdictTimeout
	return s.p2p == P2POff || s.p2p == P2PAuto && broken
}

// lookAtPeers says what is known. It reads verdicts; where there are none for GPUs it lets the allreduce command find them.
func lookAtPeers(s *settings, backend Backend, devices []int32) (peerAccess, error) {
	granted, err := driverGrants(backend, devices)
	if err != nil || granted != verdictUnproven || s.p2p == P2POff || s.ncclP2PDisable {
		return peerAccess{verdict: granted}, err
	}
	cache, note := openVerdicts(s, backend, devices)
	return consult(context.Background(), s, cache, note), nil
}

// consult reads the verdicts, and has a probe made where they are missing; note says why there is no cache.
func consult(ctx context.Context, s *settings, cache *verdictCache, note string) peerAccess {
	var p peerAccess
	if cache == nil {
		p.verdict = verdictUnproven
	} else {
		var complete bool
		if p, complete = cache.judge(); !complete && cache.mayProbe(s) {
			if note = cache.probe(ctx, s); note == "" {
				p, _ = cache.judge()
			}
		}
	}
	if note != "" && p.verdict == verdictUnproven {
		p.warnings = append(p.warnings, "peer access is not proven: "+note)
	}
	if s.p2p == P2PTrust && p.verdict != verdictProven {
		found := "nothing has proven it"
		if p.verdict != verdictUnproven {
			found = fmt.Sprintf("a probe found it %s: %s", p.verdict, p.why)
		}
		p.warnings = []string{"GGML_CUDA_P2P=1 takes the driver's word for peer access, but " + found +
			"; wrong results or hangs are possible where the machine does not deliver it"}
	}
	return p
}

// driverGrants is what the driver says: denied, one device, or unproven where it grants access for every pair.
func driverGrants(backend Backend, devices []int32) (verdict, error) {
	pairs := false
	for _, a := range devices {
		for _, b := range devices {
			if a == b {
				continue
			}
			pairs = true
			can, e := core.CanAccessPeer(int32(backend), int(a), int(b))
			if e != nil {
				return verdictDenied, fromCore("", e)
			}
			if !can {
				return verdictDenied, nil
			}
		}
	}
	if !pairs {
		return verdictOneDevice, nil
	}
	return verdictUnproven, nil
}

// verdictCache is the file with the verdicts of a communicator's devices.
type verdictCache struct {
	path    string
	dir     string
	key     verdicts.Key
	backend Backend
	devices []int32 // each once
	about   map[int32]verdicts.Device
	blind   bool // some devices are not seen from this process, and have negative numbers here
}

// openVerdicts finds the file; nil where there can be none, which note explains where a person could change it. Emulated
// devices have verdicts only in a folder that was given.
func openVerdicts(s *settings, backend Backend, devices []int32) (*verdictCache, string) {
	driver := verdicts.EmulatedDriver
	switch {
	case backend == BackendEmulated && !s.cacheDirGiven:
		return nil, ""
	case s.cacheDir == "":
		return nil, "there is no folder for verdicts: set GGML_CUDA_AR_CACHE_DIR"
	case backend != BackendEmulated:
		driver = ""
		if info, err := lookOnce(); err == nil {
			driver = info.Driver
		}
	}
	c := &verdictCache{path: verdicts.Path(s.cacheDir, backend.String()), dir: s.cacheDir, backend: backend, about: map[int32]verdicts.Device{}}
	var ok bool
	if c.key, ok = verdicts.KeyOf(driver); !ok {
		return nil, "driver version or boot id are not known, and verdicts are kept under both"
	}
	for _, d := range devices {
		if _, seen := c.about[d]; seen {
			continue
		}
		info, e := core.GetDeviceInfo(int32(backend), int(d))
		if e != nil {
			return nil, e.Error()
		}
		c.about[d] = verdicts.Device{UUID: info.UUID, BusID: info.BusID}
		c.devices = append(c.devices, d)
	}
	slices.Sort(c.devices)
	return c, ""
}

// judge gives the worst verdict of all ordered pairs; complete is false, and the verdict unproven, where one is missing.
func (c *verdictCache) judge() (p peerAccess, complete bool) {
	pairs, _ := verdicts.Read(c.path, c.key)
	p.verdict = verdictProven
	bad := 0
	for _, a := range c.devices {
		for _, b := range c.devices {
			if a == b {
				continue
			}
			found := verdicts.Find(pairs, c.about[a], c.about[b])
			if found == nil {
				return peerAccess{verdict: verdictUnproven}, false
			}
			v := verdictOf[found.Verdict]
			if v == verdictProven {
				continue
			}
			if bad++; bad == 1 || severity[v] > severity[p.verdict] {
				p.verdict = v
				p.why = fmt.Sprintf("device %d to device %d", a, b)
				for _, text := range []string{found.Detail, found.Numbers()} {
					if text != "" {
						p.why += ", " + text
					}
				}
			}
		}
	}
	if bad > 1 {
		p.why += fmt.Sprintf(" (%d of %d pairs are not ok)", bad, len(c.devices)*(len(c.devices)-1))
	}
	return p, true
}

// severity orders the verdicts that are not ok: the worst pair speaks for all.
var severity = map[verdict]int{verdictUnsupported: 1, verdictSlow: 2, verdictInconclusive: 3, verdictTimeout: 4, verdictBroken: 5}

// mayProbe: New never starts a probe for emulated devices, nor where the answer would change nothing.
func (c *verdictCache) mayProbe(s *settings) bool {
	return c.backend == BackendCUDA && !c.blind && s.p2p == P2PAuto && (s.algorithm == AlgorithmAuto || s.algorithm == AlgorithmPeer)
}

// probe lets the allreduce command find the verdicts of these devices; it says what went wrong.
func (c *verdictCache) probe(ctx context.Context, s *settings) string {
	command := findProbeCommand(s.probeCommand)
	if command == "" {
		return "run allreduce probe (New finds that command in Config.ProbeCommand, beside the executable or in PATH)"
	}
	var list []string
	for _, d := range c.devices {
		list = append(list, fmt.Sprint(d))
	}
	pairs := len(c.devices) * (len(c.devices) - 1)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(pairs+1)*probePatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, command, "probe", "--backend", c.backend.String(), "--devices", strings.Join(list, ","), "--cache", c.dir)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = nil, &said
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) && exit.ExitCode() == 1 { // 1: a finding, which the file has
		return ""
	}
	text := strings.TrimSpace(said.String())
	if i := strings.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	return fmt.Sprintf("%s probe failed (%v): %.200s", command, err, text)
}

// findProbeCommand gives the command that proves peer access, "" where there is none.
func findProbeCommand(given string) string {
	if given != "" {
		return given
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "allreduce")
		if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return beside
		}
	}
	path, err := exec.LookPath("allreduce")
	if err != nil {
		return ""
	}
	return path
}
