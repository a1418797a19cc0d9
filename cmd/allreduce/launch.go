package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// --launch N starts N processes of this command on this host, each one rank, with the variables of torchrun; what they do
// is what they would do under torchrun, mpirun or srun. Rank 0 speaks; of the others errors are shown.

// addLaunch adds --launch to a sub-command; ranksFlag is the name of the one that says how many ranks there are.
func addLaunch(cmd *cobra.Command, s streams, ranksFlag string) {
	var n int
	flags, run := cmd.Flags(), cmd.RunE
	flags.IntVar(&n, "launch", 0, "start this `number` of processes, one rank each, instead of having all ranks in this one")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !flags.Changed("launch") {
			return run(cmd, args)
		}
		if ranks := flags.Lookup(ranksFlag); ranks.Changed && ranks.Value.String() != strconv.Itoa(n) {
			return fmt.Errorf("--%s %s with --launch %d; allowed: one rank per process", ranksFlag, ranks.Value, n)
		}
		return launch(cmd.Context(), s, n, flagsAgain(cmd, "launch", ranksFlag))
	}
}

// joinLaunched gives this process's place where a launcher has started several, nil where it is alone; ranks becomes their
// number, unless another one was asked for.
func joinLaunched(ranks *int, asked bool) (*allreduce.Rank, error) {
	rank, err := launchedRank()
	if err != nil || rank == nil {
		return nil, err
	}
	if asked && *ranks != rank.World {
		return nil, fmt.Errorf("%d ranks are asked for and %d processes were launched; allowed: one rank per process", *ranks, rank.World)
	}
	*ranks = rank.World
	return rank, nil
}

// ranksHere is how many ranks are in this process.
func ranksHere(rank *allreduce.Rank, ranks int) int {
	if rank != nil {
		return 1
	}
	return ranks
}

// driveOf is that of the emulated machine: processes cannot be stepped.
func driveOf(rank *allreduce.Rank) device.Drive {
	if rank != nil {
		return device.Background
	}
	return device.Stepped
}

// silent says whether this process leaves speaking and files to rank 0.
func silent(rank *allreduce.Rank) bool { return rank != nil && rank.Rank != 0 }

// launch runs the command line without --launch in n processes and gives the worst exit code.
func launch(ctx context.Context, s streams, n int, args []string) error {
	if n < 1 || n > maxRanks {
		return fmt.Errorf("--launch %d is not allowed; allowed: 1 to %d", n, maxRanks)
	}
	if rank, launched, err := allreduce.LaunchedRank(); err != nil || launched && rank.World > 1 {
		return errors.Join(err, errors.New("--launch inside a process that was launched already"))
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	name := make([]byte, 12)
	_, _ = rand.Read(name)
	job := "launch-" + hex.EncodeToString(name)
	// The children end with the thread that started them (Pdeathsig), so this one must not.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	children := make([]*exec.Cmd, 0, n)
	var readers sync.WaitGroup
	var mutex sync.Mutex
	for rank := range n {
		cmd := exec.Command(self, args...)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "GGML_CUDA_AR_RENDEZVOUS=") }),
			fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", n), fmt.Sprint("LOCAL_RANK=", rank), fmt.Sprint("LOCAL_WORLD_SIZE=", n),
			"GGML_CUDA_AR_RENDEZVOUS="+job)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if rank == 0 {
			cmd.Stdout, cmd.Stderr = s.out, s.err
		} else if err := prefixed(cmd, s.err, &mutex, &readers, fmt.Sprintf("rank %d: ", rank)); err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			for _, c := range children {
				_ = c.Process.Kill()
				_ = c.Wait()
			}
			return err
		}
		children = append(children, cmd)
	}
	stop := context.AfterFunc(ctx, func() {
		for _, c := range children {
			_ = c.Process.Signal(syscall.SIGTERM)
		}
		time.AfterFunc(10*time.Second, func() {
			for _, c := range children {
				_ = c.Process.Kill()
			}
		})
	})
	defer stop()
	readers.Wait() // before Wait, which closes the pipes
	finding := false
	var failed []string
	for rank, c := range children {
		_ = c.Wait()
		switch state := c.ProcessState; {
		case state.ExitCode() == exitGood:
		case state.ExitCode() == exitFinding:
			finding = true
		default:
			failed = append(failed, fmt.Sprintf("rank %d ended with %s", rank, state))
		}
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case len(failed) > 0:
		return errors.New(strings.Join(failed, ", "))
	case finding:
		return errFinding
	}
	return nil
}

// prefixed passes on what a child writes to its error stream, line by line.
func prefixed(cmd *exec.Cmd, to io.Writer, mutex *sync.Mutex, readers *sync.WaitGroup, prefix string) error {
	pipe, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	readers.Go(func() {
		lines := bufio.NewScanner(pipe)
		for lines.Scan() {
			mutex.Lock()
			fmt.Fprintln(to, prefix+lines.Text())
			mutex.Unlock()
		}
		_, _ = io.Copy(io.Discard, pipe)
	})
	return nil
}

// flagsAgain is the command line of a sub-command again, without some of its flags.
func flagsAgain(cmd *cobra.Command, without ...string) []string {
	args := []string{cmd.Name()}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if slices.Contains(without, f.Name) {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			for _, v := range list.GetSlice() {
				args = append(args, "--"+f.Name+"="+v)
			}
			return
		}
		args = append(args, "--"+f.Name+"="+f.Value.String())
	})
	return args
}

// launchedRank is this process's place where a launcher has started several; nil: it is alone.
func launchedRank() (*allreduce.Rank, error) {
	rank, launched, err := allreduce.LaunchedRank()
	if err != nil || !launched || rank.World <= 1 {
		return nil, err
	}
	return &rank, nil
}

// together is gatherJSON where there are several processes; alone, this one's value is all.
func together[T any](s *session, mine T) ([]T, error) {
	if s.comm.Ranks() == len(s.ranks) {
		return []T{mine}, nil
	}
	return gatherJSON(s, mine)
}

// gatherJSON gives every process every rank's value, by rank: an all-gather by the communicator's own all-reduce. Every
// rank adds its text in a place of its own and zeroes elsewhere, one byte an element, which is exact on every wire.
func gatherJSON[T any](s *session, mine T) ([]T, error) {
	const most = 4096
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	if len(text) > most {
		return nil, fmt.Errorf("a report of %d bytes is too long", len(text))
	}
	world, dev := s.comm.Ranks(), s.devices[0]
	words := make([]byte, world*most*4)
	at := s.ranks[0] * most
	for i, b := range text {
		putFloat(words[(at+i)*4:], b)
	}
	p, err := s.driver.Malloc(dev, int64(len(words)))
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.driver.Free(dev, p) }()
	if err := s.driver.CopyToDevice(dev, p, words); err != nil {
		return nil, err
	}
	err = s.comm.AllReduce([]allreduce.Buffer{{Send: p, Recv: p, Count: world * most, Type: allreduce.F32, Stream: s.streams[0]}})
	if err == nil {
		err = s.synchronize()
	}
	if err == nil {
		err = s.driver.CopyToHost(dev, words, p)
	}
	if err != nil {
		return nil, err
	}
	all := make([]T, world)
	for r := range all {
		var theirs []byte
		for i := range most {
			b := getFloat(words[(r*most+i)*4:])
			if b == 0 {
				break
			}
			theirs = append(theirs, b)
		}
		if err := json.Unmarshal(theirs, &all[r]); err != nil {
			return nil, fmt.Errorf("rank %d's report did not arrive whole: %w", r, err)
		}
	}
	return all, nil
}

func putFloat(to []byte, b byte) {
	binary.LittleEndian.PutUint32(to, math.Float32bits(float32(b)))
}

func getFloat(from []byte) byte {
	return byte(math.Float32frombits(binary.LittleEndian.Uint32(from)))
}
