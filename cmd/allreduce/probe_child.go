package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/verdicts"
)

// A pair is probed in a process of its own, which can be ended where the GPU never answers: the command runs itself as
// `probe-child`, which reads a probeChildJob from standard input and writes a probeChildReport to descriptor 3.

// probeChildJob is one ordered pair.
type probeChildJob struct {
	Backend   string
	From, To  int
	TimeoutMs int64 // of each wait of a kernel
	Emulate   string
	Faults    []probeFault
}

type probeChildReport struct {
	Proof device.Proof
	Error string
}

func newProbeChildCommand(streams) *cobra.Command {
	return &cobra.Command{
		Use:    "probe-child",
		Short:  "Probe one pair for probe",
		Hidden: true,
		Args:   noArguments,
		RunE: func(*cobra.Command, []string) error {
			out := os.NewFile(childDescriptor, "result")
			var job probeChildJob
			if err := json.NewDecoder(os.Stdin).Decode(&job); err != nil || out == nil {
				return errors.New("is for `allreduce probe` alone")
			}
			defer out.Close()
			var report probeChildReport
			proof, err := job.run()
			if report.Proof = proof; err != nil {
				report.Error = oneLine(err)
			}
			return json.NewEncoder(out).Encode(report)
		},
	}
}

func (c *probeChildJob) run() (device.Proof, error) {
	if err := emulateMachine(c.Emulate, device.Background); err != nil {
		return device.Proof{}, err
	}
	driver, _, err := pickBackend(c.Backend, 1, nil)
	if err != nil {
		return device.Proof{}, err
	}
	for _, f := range c.Faults {
		if err := device.FailPeer(f.From, f.To, f.Fault); err != nil {
			return device.Proof{}, err
		}
	}
	return driver.ProbePeer(c.From, c.To, time.Duration(c.TimeoutMs)*time.Millisecond)
}

// start runs the child and turns whatever becomes of it into a verdict. An error means that nothing can be probed here.
func (c *probeChildJob) start(ctx context.Context, limit time.Duration) (*probePair, error) {
	pair := &probePair{From: c.From, To: c.To, Verdict: verdicts.Inconclusive}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	cmd := exec.Command(self, "probe-child")
	cmd.Stdin = bytes.NewReader(text)
	var noise bytes.Buffer
	cmd.Stderr, cmd.Stdout = &noise, &noise
	cmd.ExtraFiles = []*os.File{write}
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		_ = write.Close()
		return nil, err
	}
	_ = write.Close()
	// A process whose GPU hangs may not even die: it is not waited for longer than a moment.
	var failure error
	ended := make(chan struct{})
	go func() {
		failure = cmd.Wait()
		close(ended)
	}()
	result := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(io.LimitReader(read, 1<<20))
		result <- all
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		<-ended
		return nil, interrupted(ctx)
	case <-timer.C:
		_ = cmd.Process.Kill()
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
		}
		pair.Verdict = verdicts.Timeout
		pair.Detail = fmt.Sprintf("not done after %v, so its process was ended", limit)
		return pair, nil
	}
	var report probeChildReport
	if err := json.Unmarshal(<-result, &report); err != nil {
		lines := strings.Split(strings.TrimSpace(noise.String()), "\n")
		pair.Detail = fmt.Sprintf("its process ended without a result (%v): %.200s", failure, lines[len(lines)-1])
		return pair, nil
	}
	if report.Error != "" {
		return nil, fmt.Errorf("device %d to device %d: %s", c.From, c.To, report.Error)
	}
	p := &report.Proof
	pair.Verdict, pair.Detail = verdicts.Name(int32(p.Verdict)), p.Detail
	pair.CopyGBs, pair.StoreGBs, pair.StagedGBs = round1(p.CopyGBs), round1(p.StoreGBs), round1(p.StagedGBs)
	pair.LatencyMicros = round3(p.LatencyMicros)
	return pair, nil
}
