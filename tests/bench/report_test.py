"""bench/report: tables and plot of results made up here."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree as xml

REPORT = pathlib.Path(__file__).resolve().parents[2] / 'bench' / 'report'
SVG = '{http://www.w3.org/2000/svg}'


def cell(variant='packed', dtype='float32', dim=4096, hidden_dim=11008, rows=1, ratio=1.0, goal=None, spread=1.1,
         seconds=0.02, kernel='feed_forward'):
    shape = f'{dim}x{hidden_dim}/M{rows}' if hidden_dim else f'{rows}x{dim}'
    return {'name': f'{kernel}/{variant}/{dtype}/{shape}/t2', 'kernel': kernel, 'variant': variant, 'dtype': dtype,
            'dim': dim, 'hidden_dim': hidden_dim, 'rows': rows, 'threads': 2, 'ratio': ratio, 'goal': goal,
            'bound': 'read', 'spread': spread, 'seconds': seconds, 'gflops': None, 'gbs': 12.5, 'fits_in': 'L3',
            'error': 2e-6}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, *cells, name='a.json', machine=None):
        path = self.folder / name
        path.write_text(json.dumps({'machine': machine or {'processor': 'one & only'}, 'cells': cells}))
        return str(path)

    def run_report(self, *arguments, status=0):
        done = subprocess.run(['/usr/bin/python3', REPORT, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def test_ratios_stand_over_m_by_dtype(self):
        text = self.run_report(self.write(cell(rows=16, ratio=1.2, seconds=0.0123), cell(rows=1, ratio=1.04, goal=1.06),
                                          cell(dtype='bfloat16', rows=16, ratio=1.5)))
        self.assertIn('- processor: one & only\n', text)
        self.assertIn('feed_forward, packed, d 4096, h 11008, 2 threads; error at most 2.0e-06\n\n|  | M = 1 | M = 16 |\n', text)
        self.assertIn('| float32 | 1.04 ≤ 1.06<br>20.0 ms | 1.20<br>12.3 ms |\n', text)
        self.assertIn('| bfloat16 |  | 1.50<br>20.0 ms |\n', text)
        self.assertIn('- 3 cells; 1 of 1 goals reached.\n', text)

    def test_a_missed_goal_and_a_wide_spread_are_marked(self):
        text = self.run_report(self.write(cell(ratio=1.07, goal=1.06), cell(rows=4, ratio=1.3, spread=1.31)))
        self.assertIn('**1.07** ≤ 1.06', text)
        self.assertIn('1.30 ?<br>', text)
        self.assertIn('Missed: `feed_forward/packed/float32/4096x11008/M1/t2` 1.07 > 1.06.', text)
        self.assertIn('1 cells have a spread over 1.3', text)

    def test_a_cell_without_a_number_misses_its_goal(self):
        text = self.run_report(self.write(cell(ratio=None, goal=1.06, spread=None)))
        self.assertIn('0 of 1 goals reached', text)

    def test_other_cells_are_listed(self):
        norm = cell(kernel='rms_norm', variant='kernel', hidden_dim=0, rows=64, seconds=83e-6, ratio=1.5)
        line = '| rms_norm/kernel/float32/64x4096/t2 | 83.0 µs | 1.50 | – | read | 1.1 | – | 12.5 | L3 | 2e-06 |\n'
        self.assertIn(line, self.run_report(self.write(norm)))
        full = self.run_report(self.write(norm, cell()), '--full')
        self.assertIn('| feed_forward/packed/float32/4096x11008/M1/t2 | 20.0 ms |', full)

    def test_the_last_file_counts(self):
        first = self.write(cell(ratio=2.0), cell(rows=4, ratio=3.0), name='a.json')
        second = self.write(cell(ratio=1.5), name='b.json', machine={'processor': 'another'})
        text = self.run_report(first, second)
        self.assertIn('| float32 | 1.50<br>20.0 ms | 3.00<br>20.0 ms |', text)
        self.assertIn('- processor: another\n', text)

    def test_a_peer_is_named_with_its_error(self):
        peer = cell(variant='over_a', ratio=0.5, goal=1.0) | {'bound': 'a', 'other_error': 0.049}
        text = self.run_report(self.write(peer))
        self.assertIn('2 threads (time over that of a); error at most 2.0e-06; theirs at most 4.9e-02\n', text)

    def test_the_fastest_peer_of_each_cell_counts_in_the_mean(self):
        peers = [cell(variant='over_a', ratio=0.5, goal=1.0), cell(variant='over_b', ratio=0.8, goal=1.0),
                 cell(variant='over_a', rows=4, ratio=0.2, goal=1.0), cell(variant='over_a_amx', rows=4, ratio=2.0)]
        text = self.run_report(self.write(*peers))
        # 1 / sqrt(0.8 · 0.2) = 2.5; a peer without a goal does not count.
        self.assertIn('d 4096, h 11008: 2.50 times as fast as the fastest peer of each cell, in the geometric mean of '
                      '2 cells; 1.25 at least.', text)

    def test_the_plot_has_a_panel_for_each_dtype_and_its_goals(self):
        path = self.write(cell(ratio=1.04, goal=1.06), cell(rows=16, ratio=1.2), cell(dtype='int8', ratio=1.4),
                          cell(variant='inline', ratio=9.0))
        self.run_report(path, '--svg', str(self.folder / 'plot.svg'))
        root = xml.parse(self.folder / 'plot.svg').getroot()
        panels = root.findall(f'{SVG}g')
        self.assertEqual([panel.find(f'{SVG}text').text for panel in panels],
                         ['d 4096, h 11008: float32', 'd 4096, h 11008: int8'])
        self.assertEqual([len(panel.findall(f'{SVG}circle')) for panel in panels], [2, 1])
        self.assertEqual([len(panel.findall(f'{SVG}line[@class="goal"]')) for panel in panels], [1, 0])
        # Over a smaller ratio a point stands lower.
        heights = [float(circle.get('cy')) for circle in panels[0].findall(f'{SVG}circle')]
        self.assertGreater(heights[0], heights[1])
        self.assertIn('prefers-color-scheme: dark', root.find(f'{SVG}style').text)

    def test_a_page_is_updated_between_its_marks_alone(self):
        page = self.folder / 'docs' / 'page.md'
        page.parent.mkdir()
        page.write_text('before\n<!-- bench/report: begin -->\nold\n<!-- bench/report: end -->\nafter\n')
        arguments = (self.write(cell()), '--svg', str(page.parent / 'plot.svg'), '--update', str(page))
        self.run_report(*arguments)
        once = page.read_text()
        self.assertTrue(once.startswith('before\n<!-- bench/report: begin -->\n- processor'))
        self.assertTrue(once.endswith('|\n<!-- bench/report: end -->\nafter\n'))
        self.assertNotIn('old', once)
        self.assertIn('(plot.svg)', once)
        self.run_report(*arguments)
        self.assertEqual(page.read_text(), once)

    def test_what_cannot_be_used_is_said(self):
        good = self.write(cell())
        self.assertIn('no.json', self.run_report(str(self.folder / 'no.json'), status=1))
        (self.folder / 'bad.json').write_text('{"cells": [')
        self.assertIn('bad.json', self.run_report(str(self.folder / 'bad.json'), status=1))
        (self.folder / 'less.json').write_text(json.dumps({'machine': {}, 'cells': [{'name': 'x'}]}))
        self.assertIn("cell 'x' has no 'ratio'", self.run_report(str(self.folder / 'less.json'), status=1))
        page = self.folder / 'page.md'
        page.write_text('no marks\n')
        self.assertIn('expected one line', self.run_report(good, '--update', str(page), status=1))
        self.assertEqual(page.read_text(), 'no marks\n')
        norms = self.write(cell(kernel='rms_norm', hidden_dim=0), name='norms.json')
        self.assertIn('no cell of feed_forward', self.run_report(norms, '--svg', os.devnull, status=1))


if __name__ == '__main__':
    unittest.main()
