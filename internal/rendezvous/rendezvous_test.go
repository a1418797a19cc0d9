//go:build linux

package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("AR_TEST_CHILD"); role != "" {
		child(role)
		return
	}
	goleak.VerifyTestMain(m)
}

var secret = []byte("correct horse battery staple")

// configs gives the configurations of a group, over a socket in a folder of the test's own or over TCP.
func configs(t *testing.T, world int, tcp bool) []Config {
	t.Helper()
	c := Config{World: world, Job: t.Name(), Dir: filepath.Join(shortDir(t), "r"), Timeout: 20 * time.Second,
		Fields: []Field{{"version", "1"}, {"GGML_CUDA_AR_BLOCKS", "16"}}}
	if tcp {
		c.Address, c.Secret = freePort(t), secret
	}
	list := make([]Config, world)
	for r := range list {
		list[r] = c
		list[r].Rank = r
	}
	return list
}

// shortDir keeps socket paths below their limit.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "ar")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// openAll opens every configuration at once; groups are closed at the end of the test.
func openAll(t *testing.T, list []Config) ([]*Group, []error) {
	t.Helper()
	groups, errs := make([]*Group, len(list)), make([]error, len(list))
	var wg sync.WaitGroup
	for i := range list {
		wg.Go(func() { groups[i], errs[i] = Open(context.Background(), list[i]) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, g := range groups {
			if g != nil {
				g.Close()
			}
		}
	})
	return groups, errs
}

func requireAll(t *testing.T, errs []error) {
	t.Helper()
	for r, err := range errs {
		require.NoError(t, err, "rank %d", r)
	}
}

// together runs f for every rank at once.
func together(groups []*Group, f func(r int, g *Group)) {
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() { f(r, g) })
	}
	wg.Wait()
}

func requireEmpty(t *testing.T, c Config) {
	t.Helper()
	entries, err := os.ReadDir(c.Dir)
	require.NoError(t, err)
	require.Empty(t, entries, "nothing is left in the folder")
}

func each(t *testing.T, f func(t *testing.T, tcp bool)) {
	t.Run("unix", func(t *testing.T) { f(t, false) })
	t.Run("tcp", func(t *testing.T) { f(t, true) })
}

func TestGroup(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		for _, world := range []int{1, 2, 5} {
			list := configs(t, world, tcp)
			groups, errs := openAll(t, list)
			requireAll(t, errs)
			if !tcp && world > 1 {
				requireEmpty(t, list[0])
			}
			ctx := context.Background()
			together(groups, func(r int, g *Group) {
				for round := range 3 {
					blobs, err := g.AllGather(ctx, bytes.Repeat([]byte{byte(r)}, r*100+round))
					if !assert.NoError(t, err) || !assert.Len(t, blobs, world) {
						return
					}
					for q, b := range blobs {
						assert.Equal(t, bytes.Repeat([]byte{byte(q)}, q*100+round), append([]byte{}, b...))
					}
					assert.NoError(t, g.Barrier(ctx))
					blob, _, err := g.Broadcast(ctx, []byte(fmt.Sprint("from ", r, round)))
					assert.NoError(t, err)
					assert.Equal(t, fmt.Sprint("from ", 0, round), string(blob))
				}
			})
		}
	})
}

func TestDescriptors(t *testing.T) {
	groups, errs := openAll(t, configs(t, 3, false))
	requireAll(t, errs)
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	memory := os.NewFile(uintptr(fd), "memory")
	defer memory.Close()
	require.NoError(t, memory.Truncate(4096))
	together(groups, func(r int, g *Group) {
		blob, files, err := g.Broadcast(context.Background(), []byte("layout"), memory)
		if !assert.NoError(t, err) || !assert.Len(t, files, 1) {
			return
		}
		assert.Equal(t, "layout", string(blob))
		_, err = files[0].WriteAt([]byte{byte(r + 1)}, int64(r))
		assert.NoError(t, err)
		if r != 0 {
			assert.NotEqual(t, memory.Fd(), files[0].Fd())
			assert.NoError(t, files[0].Close())
		}
	})
	got := make([]byte, 3)
	_, err = memory.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 2, 3}, got, "one memory, seen by all")
}

func TestMismatch(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		list := configs(t, 3, tcp)
		list[2].Fields = []Field{{"version", "1"}, {"GGML_CUDA_AR_BLOCKS", "8"}}
		list[1].Timeout = 500 * time.Millisecond
		_, errs := openAll(t, list)
		for r, err := range errs {
			var mismatch *MismatchError
			if r == 1 && !errors.As(err, &mismatch) {
				// Rank 1 may have come after the end.
				continue
			}
			require.ErrorAs(t, err, &mismatch, "rank %d", r)
			require.EqualError(t, err, "GGML_CUDA_AR_BLOCKS is 16 on rank 0 and 8 on rank 2")
		}
	})
	t.Run("world", func(t *testing.T) {
		list := configs(t, 2, false)
		list[1].World = 4
		_, errs := openAll(t, list)
		for _, err := range errs {
			require.EqualError(t, err, "the number of ranks is 2 on rank 0 and 4 on rank 1")
		}
	})
	t.Run("unknown", func(t *testing.T) {
		list := configs(t, 2, false)
		list[1].Fields = append(slices.Clone(list[1].Fields), Field{"new", "x"})
		_, errs := openAll(t, list)
		for _, err := range errs {
			require.EqualError(t, err, "new is not known on rank 0 and x on rank 1")
		}
	})
}

func TestMissing(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		list := configs(t, 4, tcp)
		for i := range list {
			list[i].Timeout = 400 * time.Millisecond
		}
		start := time.Now()
		_, errs := openAll(t, []Config{list[0], list[2]})
		require.Less(t, time.Since(start), 3*time.Second)
		var missing *MissingError
		require.ErrorAs(t, errs[0], &missing)
		require.Equal(t, []int{1, 3}, missing.Ranks)
		require.EqualError(t, errs[1], errs[0].Error(), "who came is told who did not")
		require.ErrorAs(t, errs[1], &missing)
		_, errs = openAll(t, []Config{list[0], list[1], list[3]})
		for _, err := range errs {
			require.ErrorAs(t, err, &missing)
			require.Equal(t, []int{2}, missing.Ranks)
		}

		_, errs = openAll(t, []Config{list[1]})
		require.ErrorAs(t, errs[0], &missing)
		require.Equal(t, []int{0}, missing.Ranks)
		if !tcp {
			requireEmpty(t, list[0])
		}
	})
}

func TestCancel(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		for _, r := range []int{0, 1} {
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(50*time.Millisecond, cancel)
			start := time.Now()
			_, err := Open(ctx, configs(t, 2, tcp)[r])
			require.ErrorIs(t, err, context.Canceled)
			require.Less(t, time.Since(start), 2*time.Second)
		}
	})
}

// Everybody who is no rank of the group is sent away, and the group forms.
func TestStrangers(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		list := configs(t, 4, tcp)
		type result struct {
			g   *Group
			err error
		}
		opened := make(chan result, 4)
		open := func(c Config) {
			g, err := Open(context.Background(), c)
			opened <- result{g, err}
		}
		go open(list[0])
		go open(list[3])
		network, address := "unix", list[0].socketPath()
		if tcp {
			network, address = "tcp", list[0].Address
		}
		dial := func() net.Conn {
			var conn net.Conn
			require.Eventually(t, func() bool {
				var err error
				conn, err = net.Dial(network, address)
				return err == nil
			}, 5*time.Second, time.Millisecond)
			t.Cleanup(func() { _ = conn.Close() })
			return conn
		}
		dial() // half-open: says nothing, ever
		_, err := dial().Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 1000))
		_ = err // it may be gone already
		huge := putHeader(message{kind: kindHello}, 1<<31-1)
		_, _ = dial().Write(huge)
		_, _ = dial().Write(huge[:5])
		if tcp {
			wrong := list[1]
			wrong.Secret = []byte("another secret of 16 bytes")
			_, err := Open(context.Background(), wrong)
			require.ErrorIs(t, err, errSecretDiffers)
		}
		time.Sleep(100 * time.Millisecond) // the first rank 3 is there by now
		_, err = Open(context.Background(), list[3])
		require.ErrorContains(t, err, "rank 3 is here already")
		go open(list[1])
		go open(list[2])
		var groups []*Group
		for range 4 {
			r := <-opened
			require.NoError(t, r.err)
			groups = append(groups, r.g)
		}
		together(groups, func(_ int, g *Group) { assert.NoError(t, g.Barrier(context.Background())) })
		for _, g := range groups {
			g.Close()
		}
	})
}

func TestWrongUser(t *testing.T) {
	list := configs(t, 2, false)
	list[0].uid, list[0].Timeout, list[1].Timeout = 54321, 300*time.Millisecond, 300*time.Millisecond
	_, errs := openAll(t, list)
	require.ErrorContains(t, errs[0], "rank 1 did not come")
	require.ErrorContains(t, errs[0], fmt.Sprintf("turned away process %d: process %d is user %d's, not user 54321's", os.Getpid(), os.Getpid(), os.Getuid()))
	require.Error(t, errs[1])
	list = configs(t, 2, false)
	list[1].uid, list[0].Timeout = 54321, 300*time.Millisecond
	_, errs = openAll(t, list)
	require.ErrorIs(t, errs[1], errWrongUser)
}

func TestFolder(t *testing.T) {
	list := configs(t, 2, false)
	require.NoError(t, os.Mkdir(list[0].Dir, 0o755))
	_, err := Open(context.Background(), list[0])
	require.ErrorContains(t, err, "mode 0700")
	require.NoError(t, os.Remove(list[0].Dir))
	require.NoError(t, os.Symlink(t.TempDir(), list[0].Dir))
	_, err = Open(context.Background(), list[0])
	require.ErrorContains(t, err, "mode 0700")
	long := list[0]
	long.Dir = filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	_, err = Open(context.Background(), long)
	require.ErrorContains(t, err, "too long for a socket")
}

func TestSocketMode(t *testing.T) {
	list := configs(t, 2, false)
	go func() { _, _ = Open(context.Background(), list[0]) }()
	require.Eventually(t, func() bool {
		st, err := os.Lstat(list[0].socketPath())
		return err == nil && st.Mode().Perm() == 0o600
	}, 5*time.Second, time.Millisecond)
	g, err := Open(context.Background(), list[1])
	require.NoError(t, err)
	g.Close()
}

func TestDeath(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		for _, dead := range []int{0, 2} {
			groups, errs := openAll(t, configs(t, 3, tcp))
			requireAll(t, errs)
			groups[dead].fail(errors.New("killed")) // so that it does not say why it goes
			for _, m := range groups[dead].members {
				m.link.close() // as the kernel does for a killed process
			}
			for r, g := range groups {
				if r == dead {
					continue
				}
				select {
				case <-g.Done():
				case <-time.After(5 * time.Second):
					t.Fatalf("rank %d does not know that rank %d is dead", r, dead)
				}
				var lost *LostError
				require.ErrorAs(t, g.Err(), &lost)
				require.Equal(t, dead, lost.Rank, "rank %d", r)
				_, err := g.AllGather(context.Background(), nil)
				require.ErrorAs(t, err, &lost)
			}
		}
	})
}

func TestCloseIsNoDeath(t *testing.T) {
	groups, errs := openAll(t, configs(t, 3, false))
	requireAll(t, errs)
	groups[1].Close()
	groups[1].Close()
	time.Sleep(50 * time.Millisecond)
	require.NoError(t, groups[0].Err())
	require.NoError(t, groups[2].Err())
	require.ErrorIs(t, groups[1].Err(), ErrClosed)
	_, err := groups[0].AllGather(context.Background(), nil)
	require.ErrorContains(t, err, "rank 1 has closed")
}

// Whoever writes to a rank that has closed hears that, not of a broken pipe.
func TestWriteToWhoHasClosed(t *testing.T) {
	each(t, func(t *testing.T, tcp bool) {
		groups, errs := openAll(t, configs(t, 2, tcp))
		requireAll(t, errs)
		groups[0].Close()
		start := time.Now()
		for groups[1].Err() == nil { // over TCP the first write may still find a buffer
			_, err := groups[1].AllGather(context.Background(), []byte("x"))
			require.ErrorContains(t, err, "rank 0 has closed")
		}
		require.Less(t, time.Since(start), time.Second/2)
	})
}

func TestAbort(t *testing.T) {
	groups, errs := openAll(t, configs(t, 3, true))
	requireAll(t, errs)
	groups[2].Abort("no memory on rank 2")
	for _, g := range groups {
		<-g.Done()
		require.EqualError(t, g.Err(), "no memory on rank 2")
		require.Equal(t, 2, g.Err().(*LostError).Rank)
	}
}

// A rank that waits in an operation for one that does not take part gives up with its context, and so do all.
func TestDeadlineInOperation(t *testing.T) {
	groups, errs := openAll(t, configs(t, 3, false))
	requireAll(t, errs)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := groups[0].AllGather(ctx, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	<-groups[1].Done()
	require.ErrorContains(t, groups[1].Err(), "rank 0 gave up waiting for rank")
}

// What a killed rank 0 leaves is found and removed, by the next rank 0 or by whoever waits for it.
func TestStaleSocket(t *testing.T) {
	list := configs(t, 2, false)
	leave := func() {
		require.NoError(t, ownDir(list[0].Dir))
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: list[0].socketPath()}))
		require.NoError(t, unix.Close(fd))
		require.NoError(t, os.WriteFile(list[0].socketPath()+lockSuffix, nil, 0o600))
	}
	leave()
	groups, errs := openAll(t, list)
	requireAll(t, errs)
	requireEmpty(t, list[0])
	for _, g := range groups {
		g.Close()
	}
	leave()
	other := list[0]
	other.Job, other.Timeout = "another job", 100*time.Millisecond
	_, err := Open(context.Background(), other)
	require.Error(t, err)
	requireEmpty(t, list[0])
	leave()
	waiting := list[1]
	waiting.Timeout = 100 * time.Millisecond
	_, err = Open(context.Background(), waiting)
	require.Error(t, err)
	requireEmpty(t, list[0])
}

// Two groups of one job one after the other, and a second rank 0 that waits its turn.
func TestSecondGroup(t *testing.T) {
	list := configs(t, 2, false)
	for range 3 {
		groups, errs := openAll(t, list)
		requireAll(t, errs)
		for _, g := range groups {
			g.Close()
		}
	}
	first := make(chan error, 1)
	go func() {
		g, err := Open(context.Background(), list[0])
		if g != nil {
			defer g.Close()
		}
		first <- err
	}()
	require.Eventually(t, func() bool { _, err := os.Lstat(list[0].socketPath()); return err == nil }, 5*time.Second, time.Millisecond)
	second := list[0]
	second.Timeout = 200 * time.Millisecond
	_, err := Open(context.Background(), second)
	require.ErrorContains(t, err, "another rank 0")
	g, err := Open(context.Background(), list[1])
	require.NoError(t, err)
	require.NoError(t, <-first)
	g.Close()
}

// child is a rank in a process of its own, killed by the test.
func child(role string) {
	rank, _ := strconv.Atoi(os.Getenv("AR_TEST_RANK"))
	c := Config{Rank: rank, World: 3, Job: "kill", Dir: os.Getenv("AR_TEST_DIR"), Timeout: 20 * time.Second}
	g, err := Open(context.Background(), c)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("open")
	if role == "gather" {
		for {
			if _, err := g.AllGather(context.Background(), []byte("x")); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
	}
	<-g.Done()
	fmt.Println(g.Err())
}

// kill -9 of a rank while the group forms, idles and gathers: the others learn of it, and no file is left.
func TestKill(t *testing.T) {
	for _, role := range []string{"forming", "idle", "gather"} {
		for _, victim := range []int{0, 1} {
			t.Run(fmt.Sprint(role, victim), func(t *testing.T) {
				c := Config{World: 3, Job: "kill", Dir: filepath.Join(shortDir(t), "r"), Timeout: 2 * time.Second}
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "AR_TEST_CHILD="+role, "AR_TEST_RANK="+fmt.Sprint(victim), "AR_TEST_DIR="+c.Dir)
				out, err := cmd.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, cmd.Start())
				kill := func() {
					require.NoError(t, cmd.Process.Kill())
					_ = cmd.Wait()
				}
				others := slices.DeleteFunc([]int{0, 1, 2}, func(r int) bool { return r == victim })
				list := []Config{c, c}
				list[0].Rank, list[1].Rank = others[0], others[1]
				if role == "forming" {
					time.AfterFunc(300*time.Millisecond, kill)
					_, errs := openAll(t, list[:1]) // the third never comes
					require.Error(t, errs[0])
					requireEmpty(t, c)
					return
				}
				groups, errs := openAll(t, list)
				requireAll(t, errs)
				line := make([]byte, 5)
				_, err = io.ReadFull(out, line)
				require.NoError(t, err)
				if role == "gather" {
					time.AfterFunc(50*time.Millisecond, kill)
				} else {
					kill()
				}
				together(groups, func(_ int, g *Group) {
					for role == "gather" {
						if _, err := g.AllGather(context.Background(), []byte("y")); err != nil {
							break
						}
					}
					select {
					case <-g.Done():
					case <-time.After(5 * time.Second):
					}
					var lost *LostError
					assert.ErrorAs(t, g.Err(), &lost)
				})
				requireEmpty(t, c)
			})
		}
	}
}
